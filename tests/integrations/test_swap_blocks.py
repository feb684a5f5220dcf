"""Fused feed-forward and output blocks of BERT-like layers: classes, results, unfused cases."""

import copy
import pickle

import pytest
import torch
from hf_families import Outputs, transformers
from nn_helpers import run, swapped_copy

from fused_attn.integrations.transformers import by_code
from fused_attn.integrations.transformers.blocks import FeedForwardHidden, ResidualNorm
from fused_attn.nn import activation
from fused_attn.swap import swap_modules

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 60,
}
BERTS = ("Bert", "Roberta", "Camembert", "Electra", "XLMRoberta")
ACTS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "silu", "gelu_python")


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    monkeypatch.setattr(activation, "MIN_NUMEL", 0)  # so that small models run the fused pass


def new(kind="Bert", **settings):
    config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
    return getattr(transformers, f"{kind}Model")(config)


def batch():
    ids = torch.randint(5, 60, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[2, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def results(model, inputs):
    """Return the hidden states of real tokens, and the gradients of all parameters."""
    return run(Outputs(model, ("last_hidden_state",)), (), inputs)


def assert_same(model, swapped):
    inputs = batch()
    expected = results(model, inputs)
    torch.testing.assert_close(results(swapped, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", BERTS)
def test_layers_are_swapped(kind):
    model = new(kind).eval()
    swapped = copy.deepcopy(model)
    report = swap_modules(swapped)
    layer = swapped.encoder.layer[0]
    assert isinstance(layer.intermediate, FeedForwardHidden)
    assert isinstance(layer.output, ResidualNorm)
    assert isinstance(layer.attention.output, ResidualNorm)
    assert "encoder.layer.1.intermediate" in {s.name for s in report.swapped}
    assert_same(model, swapped)
    assert_same(model, pickle.loads(pickle.dumps(swapped)))
    report.restore()
    assert type(layer.output).__module__.startswith("transformers.")
    assert_same(model, swapped)


@pytest.mark.parametrize("name", ACTS)
def test_activations(name):
    model = new(hidden_act=name).eval()
    assert_same(model, swapped_copy(model))


def test_one_pass_each():
    """In training mode, the encoder's forward does not call torch's GELU, dropout or layer norm.

    Gradient checkpointing gives the same output and gradients.
    """
    model, inputs = new(attention_probs_dropout_prob=0.1).train(), batch()
    swap_modules(model)
    with torch.profiler.profile() as profile:
        model.encoder(torch.randn(2, 5, 24))
    called = {event.key for event in profile.key_averages()}
    assert not called & {"aten::gelu", "aten::bernoulli_", "aten::native_layer_norm"}
    torch.manual_seed(3)
    expected = results(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(3)
    torch.testing.assert_close(results(model, inputs), expected)


@pytest.mark.parametrize("name", ["intermediate.dense", "output.dense", "output.dropout"])
def test_hooks_receive_the_original_tensors(name):
    model, ids, seen = new().eval(), batch()["input_ids"], []
    for each in (model, swapped_copy(model)):
        module = each.encoder.layer[1].get_submodule(name)
        module.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
        each(ids)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-5)


def test_replaced_linear_is_called():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = new().eval()
    for part in (model.encoder.layer[0].intermediate, model.encoder.layer[0].output):
        part.dense.__class__ = Doubled
    assert_same(model, swapped_copy(model))


@pytest.mark.parametrize(("attention", "norm"), [(True, False), (False, True)])
def test_parts_of_the_swap(attention, norm):
    """attention=True also swaps output blocks; with norm=False, their norms remain torch's."""
    model = new().eval()
    swapped = swapped_copy(model, attention=attention, norm=norm)
    output = swapped.encoder.layer[0].output
    assert isinstance(output, ResidualNorm) == attention
    assert (type(output.LayerNorm) is torch.nn.LayerNorm) == (not norm)
    assert swapped.config._attn_implementation == ("fused_attn" if attention else "sdpa")
    assert_same(model, swapped)


def test_unknown_code_in_classes_of_known_names_is_not_swapped():
    class OtherOutput(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(24, 24)
            self.LayerNorm = torch.nn.LayerNorm(24)
            self.dropout = torch.nn.Dropout(0.0)

        def forward(self, hidden_states, input_tensor):
            return self.LayerNorm(self.dropout(self.dense(hidden_states)) - input_tensor)

    OtherOutput.__module__ = "transformers.models.other.modeling_other"
    model = new().eval()
    model.encoder.layer[0].output = OtherOutput()
    swap_modules(model)
    assert type(model.encoder.layer[0].output) is OtherOutput


class Patch:
    """A callable without code."""

    def __call__(self, *args):
        return "patched"


def test_classes_that_were_patched_before_the_first_swap_are_skipped(monkeypatch):
    original = transformers.models.bert.modeling_bert.BertOutput
    layer = original(transformers.BertConfig(**SIZES)).eval()
    hidden, x = torch.randn(2, 5, 40), torch.randn(2, 5, 24)
    try:
        for patch in (lambda self, hidden, x: self.dense(hidden), Patch()):
            monkeypatch.setattr(original, "forward", patch)
            by_code._by_code.cache_clear()
            swap_modules(torch.nn.Sequential(layer))
            assert type(layer) is original
        assert layer(hidden, x) == "patched"
    finally:
        by_code._by_code.cache_clear()


def test_compiled():
    model = new().eval()
    compiled = swapped_copy(model)
    compiled.compile(backend="aot_eager")
    assert_same(model, compiled)
