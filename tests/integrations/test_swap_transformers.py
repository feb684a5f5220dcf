"""swap_modules on complete models of Hugging Face transformers: results, report, restore."""

import copy
import subprocess
import sys

import pytest
import torch
from enable_helpers import functions_called, spy_on_masks
from hf_families import (
    BY_NAME,
    FAMILIES,
    VOCABULARY,
    Outputs,
    is_structured,
    transformers,
)
from hf_results import _exact_softmax
from nn_helpers import (
    DRAWS,
    assert_equal_in_float64,
    assert_within_contract,
    cast,
    pooled,
    run,
    swapped_copy,
)

from fused_attn.integrations.transformers.norms import TransformersNorm
from fused_attn.nn.norm import Norm
from fused_attn.swap import swap_modules

NORM_NAMES = ("LayerNorm", "RMSNorm")


def exact(model):
    """Return a float64 copy of the model, including parts that the library computes in float32."""
    model = copy.deepcopy(model).double()
    for module in norms(model):
        if not isinstance(module, torch.nn.LayerNorm):
            offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
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


@_exact_softmax()
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family(family, monkeypatch):
    """Each attention call and norm of a swapped model is fused, and its masks are structured."""
    model = family.model("eager")
    truth = exact(model)
    fused = copy.deepcopy(model).double()
    report = swap_modules(fused, remove_padding=False)
    inputs, masks = cast(inputs_of(family), torch.float64), spy_on_masks(monkeypatch)
    with functions_called("layer_norm", "rms_norm") as norm_calls:
        expected = run(Outputs(truth, family.outputs), (), inputs)
        assert not masks and not norm_calls
        actual = run(Outputs(fused, family.outputs), (), inputs)
    assert_equal_in_float64(actual, expected)

    assert len(masks) == family.attentions and all(map(is_structured, masks))
    assert not report.skipped
    assert all(isinstance(norm, Norm) for norm in norms(fused))
    assert len(norm_calls) >= len(norms(fused)) > 0
    swapped = {s.name for s in report.swapped}
    assert swapped >= {name for name, m in fused.named_modules() if isinstance(m, Norm)}
    assert any(s.to_type == "fused_attn attention" for s in report.swapped)


@_exact_softmax()
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_numerics_in_float32(family):
    model = family.model("eager")
    inputs = [inputs_of(family) for _ in range(DRAWS)]
    results = []
    for made in (swapped_copy(model), model, exact(model)):
        with torch.no_grad():
            runs = [Outputs(made, family.outputs)(**cast(i, made.dtype)) for i in inputs]
        results.append(pooled([{f"out{i}": o for i, o in enumerate(out)} for out in runs]))
    assert_within_contract(*results)


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
        model = swapped_copy(BY_NAME[name].model())
        torch.save(model, tmp_path / f"{name}.pt")
        with torch.no_grad():
            expected.append(model(input_ids=torch.arange(6).reshape(1, 6))[0])
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), expected)
