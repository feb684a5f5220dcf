"""RMS norms of Hugging Face transformers: known classes, results, and skipped classes."""

import copy
import importlib
import pickle

import pytest
import torch
from helpers import saved_and_loaded
from nn_helpers import (
    DRAWS,
    assert_equal_in_float64,
    assert_within_contract,
    perturb,
    pooled,
    run,
)

from fused_attn import functional
from fused_attn.integrations.transformers.norms import TransformersNorm
from fused_attn.swap import contains_fused_modules, swap_modules

pytest.importorskip("transformers", minversion="5.0", reason="reason: needs transformers")

HIDDEN = 24
# class -> (its module under transformers.models, the number that the formula adds to its weight)
NORMS = {
    "LlamaRMSNorm": ("llama.modeling_llama", 0.0),
    "Qwen3RMSNorm": ("qwen3.modeling_qwen3", 0.0),
    "MistralRMSNorm": ("mistral.modeling_mistral", 0.0),
    "Gemma2RMSNorm": ("gemma2.modeling_gemma2", 1.0),
    "GptOssRMSNorm": ("gpt_oss.modeling_gpt_oss", 0.0),
    "T5LayerNorm": ("t5.modeling_t5", 0.0),
}
# (dtype of the input, dtype of the weight), with the mixed cases of autocast and of T5
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
]


@pytest.fixture(params=NORMS)
def norm(request):
    return make(request.param)


def class_of(name):
    return getattr(importlib.import_module(f"transformers.models.{NORMS[name][0]}"), name)


def make(name):
    return perturb(class_of(name)(HIDDEN, eps=1e-3))


class Exact(torch.nn.Module):
    """RMS norm in float64, with the weight of a given norm."""

    def __init__(self, norm):
        super().__init__()
        self.weight = torch.nn.Parameter(norm.weight.detach().double())
        self.offset = NORMS[type(norm).__name__][1]

    def forward(self, x):
        mean_square = x.square().mean(-1, keepdim=True)
        return x / (mean_square + 1e-3).sqrt() * (self.weight + self.offset)


@pytest.mark.parametrize(("input_type", "weight_type"), TYPES, ids=str)
def test_numerics_and_type(norm, input_type, weight_type):
    norm.to(weight_type)
    fused = copy.deepcopy(norm)
    swap_modules(fused)
    results = {"fused": [], "eager": [], "truth": []}
    for _ in range(DRAWS):
        x = torch.randn(3, 5, HIDDEN).to(input_type).requires_grad_()
        exact = x.detach().double().requires_grad_()
        results["fused"].append(run(fused, (x,)))
        results["eager"].append(run(norm, (x,)))
        results["truth"].append(run(Exact(norm), (exact,)))
    assert_within_contract(*(pooled(results[key]) for key in ("fused", "eager", "truth")))


def test_equal_in_float64(norm):
    x = torch.randn(3, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    exact = Exact(norm)
    fused = norm.double()
    swap_modules(fused)
    assert_equal_in_float64(run(fused, (x,)), run(exact, (x,)))


def test_the_kernel_is_called(norm, monkeypatch):
    calls = []
    rms_norm = functional.rms_norm
    monkeypatch.setattr(
        functional, "rms_norm", lambda *args, **kwargs: calls.append(1) or rms_norm(*args, **kwargs)
    )
    x = torch.randn(2, HIDDEN)
    norm(x)
    assert not calls
    swap_modules(norm)
    norm(x)
    assert calls == [1]


def test_report_identity_and_restore(norm):
    model = torch.nn.ModuleDict({"first": norm, "tied": norm})
    kind, x = type(norm), torch.randn(2, HIDDEN)
    before, shown = norm(x), repr(norm)
    report = swap_modules(model)
    name = f"fused_attn.integrations.transformers.norms.{kind.__name__}"
    assert [(s.name, s.to_type) for s in report.swapped] == [("first", name), ("tied", name)]
    assert model["first"] is model["tied"] is norm
    assert isinstance(norm, kind) and isinstance(norm, TransformersNorm)
    assert repr(norm) == f"fused_attn.{shown}"
    assert contains_fused_modules(model)
    assert not swap_modules(model).swapped
    report.restore()
    assert type(norm) is kind
    assert torch.equal(norm(x), before)


def test_only_norms_on_request(norm):
    assert not swap_modules(norm, norm=False).swapped
    assert len(swap_modules(norm, attention=False).swapped) == 1


def test_copies_and_pickles_stay_swapped(norm):
    model = torch.nn.Sequential(norm)
    swap_modules(model)
    x = torch.randn(2, HIDDEN)
    expected = model(x)
    pickled = pickle.loads(pickle.dumps(model))
    for made in (copy.deepcopy(model), pickled, saved_and_loaded(model)):
        assert type(made[0]) is type(norm)
        assert made[0].weight is not norm.weight
        assert torch.equal(made(x), expected)


@pytest.mark.sampled(
    "LlamaRMSNorm has their forward", norm=["Qwen3RMSNorm", "MistralRMSNorm", "GptOssRMSNorm"]
)
def test_compile(norm):
    swap_modules(norm)
    x = torch.randn(2, HIDDEN, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    results = []
    for model in (compiled, norm):
        out = model(x)
        results.append((out, *torch.autograd.grad(out.sum(), (x, *norm.parameters()))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm"])
def test_autocast_gives_the_type_of_the_original(name):
    original = make(name)
    fused = copy.deepcopy(original)
    swap_modules(fused)
    x = torch.randn(2, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            assert fused(given).dtype == original(given).dtype


def test_subclasses_are_left_alone():
    class Shifted(class_of("LlamaRMSNorm")):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1.0

    module = Shifted(HIDDEN)
    report = swap_modules(module)
    assert type(module) is Shifted
    assert "subclass of transformers.models.llama" in report.skipped[0].reason


def test_norms_of_unknown_code_are_left_alone():
    class FusedRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(HIDDEN))

        def forward(self, hidden_states):
            return hidden_states * self.weight

    class ChangedRMSNorm(torch.nn.Module):
        """Norm with the module and attributes of Llama's norm, but a different formula."""

        __module__ = class_of("LlamaRMSNorm").__module__

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(HIDDEN))
            self.variance_epsilon = 1e-6

        def forward(self, hidden_states):
            return self.weight * hidden_states

    for kind in (FusedRMSNorm, ChangedRMSNorm):
        report = swap_modules(torch.nn.Sequential(kind()))
        assert not report.swapped
        assert "its computation is unknown" in report.skipped[0].reason


# Models with copies of the classes above: a sample of more than 150 classes.
COPIES = ["Qwen2", "Qwen3Moe", "Mixtral", "Phi3", "Gemma", "Gemma3", "Olmo2", "MT5", "Pix2Struct"]


@pytest.mark.parametrize("model", COPIES)
def test_copies_in_other_models_are_known(model):
    module = importlib.import_module(
        f"transformers.models.{model_folder(model)}.modeling_{model_folder(model)}"
    )
    kind = getattr(module, f"{model}RMSNorm", None) or getattr(module, f"{model}LayerNorm")
    norm = perturb(kind(HIDDEN))
    x = torch.randn(2, HIDDEN)
    expected = norm(x)
    assert len(swap_modules(norm).swapped) == 1
    torch.testing.assert_close(norm(x), expected)


def model_folder(model):
    folders = {"Qwen3Moe": "qwen3_moe"}
    return folders.get(model, model.lower())
