"""RMS norms of Hugging Face transformers: known classes, results, and skipped classes."""

import copy
import importlib
import pickle

import pytest
import torch
from helpers import saved_and_loaded
from nn_helpers import DRAWS, assert_within_contract, cast, perturb, pooled, run, swapped_copy

from fused_attn.integrations.transformers.norms import TransformersNorm
from fused_attn.swap import contains_fused_modules, swap_modules

pytest.importorskip("transformers", minversion="5.0", reason="reason: needs transformers")

HIDDEN = 24
# class -> (its module under transformers.models, number that its formula adds to the weight)
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
    inputs = [torch.randn(3, 5, HIDDEN).to(input_type).requires_grad_() for _ in range(DRAWS)]
    fused, eager = ([run(m, (x,)) for x in inputs] for m in (swapped_copy(norm), norm))
    truth = [run(Exact(norm), (cast(x, torch.float64),)) for x in inputs]
    assert_within_contract(*map(pooled, (fused, eager, truth)))


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


def test_norm_flag(norm):
    assert not swap_modules(norm, norm=False).swapped
    assert len(swap_modules(norm, attention=False).swapped) == 1


def test_copies_and_pickles_stay_swapped(norm):
    swap_modules(norm)
    x = torch.randn(2, HIDDEN)
    expected = norm(x)
    pickled = pickle.loads(pickle.dumps(norm))
    for made in (copy.deepcopy(norm), pickled, saved_and_loaded(norm)):
        assert type(made) is type(norm)
        assert made.weight is not norm.weight
        assert torch.equal(made(x), expected)


@pytest.mark.sampled(
    "LlamaRMSNorm has their forward", norm=["Qwen3RMSNorm", "MistralRMSNorm", "GptOssRMSNorm"]
)
def test_compile(norm):
    swap_modules(norm)
    x = torch.randn(2, HIDDEN, requires_grad=True)
    expected = run(norm, (x,))
    torch._dynamo.reset()
    norm.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(norm, (x,)), expected)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm"])
def test_autocast_returns_the_dtype_of_the_original(name):
    original = make(name)
    fused, x = swapped_copy(original), torch.randn(2, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            assert fused(given).dtype == original(given).dtype


def test_subclasses_are_skipped():
    class Shifted(class_of("LlamaRMSNorm")):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1.0

    module = Shifted(HIDDEN)
    report = swap_modules(module)
    assert type(module) is Shifted
    assert "subclass of transformers.models.llama" in report.skipped[0].reason


def test_norms_with_unknown_code_are_skipped():
    class FusedRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(HIDDEN))
            self.variance_epsilon = 1e-6

        def forward(self, hidden_states):
            return self.weight * hidden_states

    class ChangedRMSNorm(FusedRMSNorm):
        """Norm with the module and attributes of Llama's norm, but a different formula."""

        __module__ = class_of("LlamaRMSNorm").__module__

    for kind in (FusedRMSNorm, ChangedRMSNorm):
        report = swap_modules(torch.nn.Sequential(kind()))
        assert not report.swapped
        assert "its computation is unknown" in report.skipped[0].reason


# Models with copies of the classes above: a sample of more than 150 classes.
COPIES = ["Qwen2", "Qwen3Moe", "Mixtral", "Phi3", "Gemma", "Gemma3", "Olmo2", "MT5", "Pix2Struct"]


@pytest.mark.parametrize("model", COPIES)
def test_copies_in_other_models_are_known(model):
    folder = "qwen3_moe" if model == "Qwen3Moe" else model.lower()
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kind = getattr(module, f"{model}RMSNorm", None) or getattr(module, f"{model}LayerNorm")
    norm = perturb(kind(HIDDEN))
    x = torch.randn(2, HIDDEN)
    expected = norm(x)
    assert len(swap_modules(norm).swapped) == 1
    torch.testing.assert_close(norm(x), expected)
