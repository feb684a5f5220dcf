"""swap_modules on whole Hugging Face transformers models: results, report, restore."""

import copy
import subprocess
import sys

import pytest
import torch
from enable_helpers import functions_called
from hf_families import BY_NAME, FAMILIES, VOCABULARY, Outputs, transformers
from nn_helpers import DRAWS, assert_equal_in_float64, assert_within_contract, cast, pooled, run

from fused_attn.integrations.transformers.norms import TransformersNorm
from fused_attn.nn.norm import Norm
from fused_attn.swap import swap_modules

NORM_NAMES = ("LayerNorm", "RMSNorm")


@pytest.fixture
def kernel_calls():
    """Return a list to which each call of our attention or norms appends the function's name."""
    names = ("scaled_dot_product_attention", "varlen_attention", "layer_norm", "rms_norm")
    with functions_called(*names) as seen:
        yield seen


def exact(model, monkeypatch):
    """Return a float64 copy of the model, including parts that the library computes in float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda input, dim=None, dtype=None: softmax(input, dim)
    )
    model = copy.deepcopy(model).double()
    for module in model.modules():
        name = type(module).__name__
        if name.endswith(NORM_NAMES) and not isinstance(module, torch.nn.LayerNorm):
            offset = 1.0 if name.startswith("Gemma") else 0.0
            module.forward = rms_norm(module, offset)
    return model


def rms_norm(module, offset):
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon

    def forward(x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight + offset, eps)

    return forward


def inputs_of(family):
    inputs = family.inputs()
    if family.name == "CLIP":
        # CLIP pools at the token with the largest id, so that token must not be padding.
        inputs["input_ids"].clamp_(max=VOCABULARY - 2)[:, 4] = VOCABULARY - 1
    return inputs


def norms(model):
    return [m for m in model.modules() if type(m).__name__.endswith(NORM_NAMES)]


def implementations(model):
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    configs += [getattr(c, key) for c in configs for key in c.sub_configs]
    return [getattr(c, "_attn_implementation", None) for c in configs]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family(family, kernel_calls, monkeypatch):
    model = family.model("eager")
    truth = exact(model, monkeypatch)
    fused = copy.deepcopy(model).double()
    report = swap_modules(fused)
    inputs = cast(inputs_of(family), torch.float64)
    kernel_calls.clear()  # swap_modules compares a packed batch with a padded one
    expected = run(Outputs(truth, family.outputs), (), inputs)
    assert not kernel_calls
    actual = run(Outputs(fused, family.outputs), (), inputs)
    assert_equal_in_float64(actual, expected)

    assert not report.skipped
    assert all(isinstance(norm, Norm) for norm in norms(fused))
    attentions = ("scaled_dot_product_attention", "varlen_attention")  # padded or packed batches
    assert sum(kernel_calls.count(name) for name in attentions) == family.attentions
    called = kernel_calls.count("layer_norm") + kernel_calls.count("rms_norm")
    assert called >= len(norms(fused)) > 0
    swapped = {s.name for s in report.swapped}
    assert swapped >= {name for name, m in fused.named_modules() if isinstance(m, Norm)}
    assert any(s.to_type == "fused_attn attention" for s in report.swapped)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_numerics_in_float32(family, monkeypatch):
    model = family.model("eager")
    fused = copy.deepcopy(model)
    swap_modules(fused)
    inputs = [inputs_of(family) for _ in range(DRAWS)]
    results = {}
    for name, made in (("eager", model), ("fused", fused), ("truth", exact(model, monkeypatch))):
        dtype = torch.float64 if name == "truth" else torch.float32
        with torch.no_grad():
            runs = [Outputs(made, family.outputs)(**cast(given, dtype)) for given in inputs]
        results[name] = pooled([{f"out{i}": o for i, o in enumerate(out)} for out in runs])
    assert_within_contract(results["fused"], results["eager"], results["truth"])


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_restore(family):
    model = family.model().train()
    before = [type(m) for m in model.modules()], implementations(model)
    inputs = family.inputs()

    def outputs():
        torch.manual_seed(3)  # for dropout
        return run(Outputs(model, family.outputs), (), inputs)

    expected = outputs()
    report = swap_modules(model)
    assert ([type(m) for m in model.modules()], implementations(model)) != before
    report.restore()
    assert ([type(m) for m in model.modules()], implementations(model)) == before
    actual = outputs()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_weights_are_loaded_and_initialized_after_the_swap(tmp_path):
    family = BY_NAME["Llama"]
    model = family.model()
    report = swap_modules(model)
    assert any(isinstance(norm, TransformersNorm) for norm in norms(model))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    swap_modules(loaded)
    kwargs = family.inputs()
    assert torch.equal(loaded.eval()(**kwargs).logits, model(**kwargs).logits)
    norm = norms(model)[0]
    model._init_weights(norm)  # recognizes norms by the name of their class
    assert norm.weight.eq(1.0).all()
    report.restore()


SCRIPT = """
import sys, torch
folder = sys.argv[1]
models = [torch.load(f"{folder}/{name}.pt", weights_only=False) for name in ("Bert", "Llama")]
ids = torch.arange(6).reshape(1, 6)
torch.save([model(input_ids=ids)[0] for model in models], f"{folder}/outputs.pt")
"""


def test_loaded_in_another_process(tmp_path):
    """Unpickling a swapped module imports the package, which registers its attention."""
    expected = []
    for name in ("Bert", "Llama"):
        model = BY_NAME[name].model()
        swap_modules(model)
        torch.save(model, tmp_path / f"{name}.pt")
        with torch.no_grad():
            expected.append(model(input_ids=torch.arange(6).reshape(1, 6))[0])
    script = [sys.executable, "-c", SCRIPT, tmp_path]
    subprocess.run(script, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), expected)
