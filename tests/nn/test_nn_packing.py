"""Encoder stacks that compute only the real tokens match torch.nn, and return 0 at padding."""

import copy
from types import SimpleNamespace

import pytest
import torch
from graphs import Recorded
from nn_helpers import EMBED, HEADS, causal_bias, check_against_torch, perturb, randn
from padded_models import recorded_packings
from torch.nn import Module

import fused_attn.nn as fnn
from fused_attn import masks
from fused_attn.base import small_calls

LENGTH, BATCH = 9, 3
IGNORED = {
    "right": torch.arange(LENGTH) >= torch.tensor([[4], [9], [1]]),
    "left": torch.arange(LENGTH) < torch.tensor([[4], [0], [8]]),
    "holes": torch.arange(LENGTH) % torch.tensor([[2], [9], [5]]) == 1,
}
MASKS = {
    "none": dict,
    "hint": lambda: {"is_causal": True, "mask": causal_bias(LENGTH)},
    "found": lambda: {"mask": causal_bias(LENGTH)},
    "learned": lambda: {"mask": randn(LENGTH, LENGTH)},
    "of heads": lambda: {"mask": randn(BATCH * HEADS, LENGTH, LENGTH)},
}


@pytest.fixture
def packings(monkeypatch):
    """Return a list of the Packing of each run of a stack; None for a run that is not packed."""
    return recorded_packings(monkeypatch)


@pytest.fixture
def any_size():
    """Allow data-dependent sizes in compiled graphs."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch.compiler.reset()


class Stack(Module):
    """Encoder whose padded rows are 0: torch's are set to 0, and ours are asserted to be 0."""

    def __init__(self, encoder, ignored):
        super().__init__()
        self.encoder, self.ignored = encoder, ignored

    def forward(self, src, **kwargs):
        out = self.encoder(src, src_key_padding_mask=self.ignored, **kwargs)
        batch_first = self.encoder.layers[0].self_attn.batch_first
        rows = self.ignored if batch_first else self.ignored.t()
        if type(self.encoder) is fnn.TransformerEncoder:
            assert not out[rows].any()
            return out
        return out.masked_fill(rows[..., None], 0.0)


def encoder(norm=True, dtype=torch.float64, embed=EMBED, heads=HEADS, **kwargs):
    layer = torch.nn.TransformerEncoderLayer(
        embed, heads, 40, **{"dropout": 0.0, "dtype": dtype, "batch_first": True, **kwargs}
    )
    last = torch.nn.LayerNorm(embed, dtype=dtype) if norm else None
    return perturb(torch.nn.TransformerEncoder(layer, 2, last))


def fused(stack):
    return fnn.TransformerEncoder.from_torch(copy.deepcopy(stack))


def batch(batch_first=True, dtype=torch.float64):
    return randn(*((BATCH, LENGTH) if batch_first else (LENGTH, BATCH)), EMBED, dtype=dtype)


def padded(stack, *args, **kwargs):
    """Run a stack without packing."""
    stack.enable_nested_tensor = False
    out = stack(*args, **kwargs)
    stack.enable_nested_tensor = True
    return out


@pytest.mark.sampled(
    "each padding and each mask runs at least once",
    padding=["left", "holes"],
    mask=["hint", "found", "learned"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padding", IGNORED)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"batch_first": False, "norm_first": True, "activation": "gelu"}, {"bias": False}],
    ids=["post", "pre", "no_bias"],
)
def test_results_are_those_of_torch(kwargs, padding, mask, packings):
    ignored = IGNORED[padding]
    stack = Stack(encoder(norm=not kwargs, **kwargs), ignored)
    convert = SimpleNamespace(from_torch=lambda m: Stack(fused(m.encoder), m.ignored))
    x, call = batch(kwargs.get("batch_first", True)), MASKS[mask]()
    if padding == "left" and call:  # torch returns NaN for the first queries: all keys are masked
        call["mask"] = call["mask"].detach().clamp(min=-1e9)
        call.pop("is_causal", None)
    check_against_torch(stack, convert, (x,), call)
    # Masks that are not causal prevent packing, unless padding is at the end.
    refused = padding != "right" and mask not in ("none", "hint", "found")
    refused |= padding == "left" and mask != "none"
    assert packings and all((packing is None) == refused for packing in packings)


def test_only_masks_of_relative_positions_are_packed(packings):
    stack = fused(encoder())
    x = batch()
    ignored = IGNORED["right"]
    window = masks.sliding_window(2, 1) & masks.alibi(torch.rand(HEADS))
    out, expected = stack(x, window, ignored), padded(stack, x, window, ignored)
    torch.testing.assert_close(out[~ignored], expected[~ignored])
    stack(x, masks.causal(align="bottom_right"), ignored)
    stack(x, masks.documents(torch.zeros(1, LENGTH).long()), ignored)
    assert len(packings) == 1 and packings[0] is not None


def test_sequences_of_only_padding():
    ignored = IGNORED["right"].clone()
    ignored[1] = True
    stack = fused(encoder())
    x = batch()
    out = stack(x, src_key_padding_mask=ignored)
    out.sum().backward()
    assert not out[1].any()
    assert out.isfinite().all() and x.grad.isfinite().all() and not x.grad[ignored].any()


def test_nan_in_padding_has_no_effect():
    ignored = IGNORED["right"]
    stack = fused(encoder())
    x = randn(BATCH, LENGTH, EMBED, grad=False).masked_fill(ignored[..., None], float("nan"))
    x.requires_grad_()
    out = stack(x, src_key_padding_mask=ignored)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in stack.parameters())
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_training_with_dropout():
    stack = fused(encoder(dropout=0.5, dtype=torch.float32)).train()
    x, ignored = batch(dtype=torch.float32), IGNORED["right"]
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(stack(x, src_key_padding_mask=ignored))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert not outs[0][ignored].any()
    expected = stack.eval()(x, src_key_padding_mask=ignored)
    assert not torch.equal(outs[0], expected)


def test_autocast():
    stack = fused(encoder(dtype=torch.float32))
    x, ignored = batch(dtype=torch.float32), IGNORED["right"]
    with torch.autocast("cpu", torch.bfloat16):
        out = stack(x, src_key_padding_mask=ignored)
        expected = padded(stack, x, src_key_padding_mask=ignored)
    torch.testing.assert_close(out[~ignored], expected[~ignored], rtol=0.05, atol=0.05)


class Custom(fnn.TransformerEncoderLayer):
    """Subclass that a user defines."""


class Centered(torch.nn.Linear):
    """Linear layer whose output at a token depends on all tokens of the sequence."""

    def forward(self, x):
        return super().forward(x - x.mean(-2, keepdim=True))


def _hooked(stack):
    stack.layers[1].linear1.register_forward_hook(lambda *_: None)


def _custom_layer(stack):
    stack.layers[0].__class__ = Custom


def _custom_linear(stack):
    stack.layers[0].linear1 = torch.nn.Sequential(stack.layers[0].linear1)


def _mixing_linear(stack):
    stack.layers[0].linear1.__class__ = Centered


def _mixing_method(stack):
    stack.layers[0]._feed_forward = lambda x: x.mean(1, keepdim=True).expand_as(x)


@pytest.mark.parametrize(
    "change", [_hooked, _custom_layer, _custom_linear, _mixing_linear, _mixing_method]
)
def test_customized_stacks_are_not_packed(change, packings):
    stack, x, ignored = fused(encoder(norm=False)), batch(), IGNORED["right"]
    change(stack)
    out = stack(x, src_key_padding_mask=ignored)
    assert not packings and not out[ignored].any()
    expected = padded(stack, x, src_key_padding_mask=ignored)
    torch.testing.assert_close(out[~ignored], expected[~ignored])


def test_global_hooks_prevent_packing(packings):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        out = fused(encoder())(batch(), src_key_padding_mask=IGNORED["left"])
    finally:
        handle.remove()
    assert not packings and not out[IGNORED["left"]].any()


def test_enable_nested_tensor_turns_packing_off(packings):
    stack, ignored = encoder(), IGNORED["right"]
    stack.enable_nested_tensor = False
    x = batch()
    out, expected = (s(x, src_key_padding_mask=ignored) for s in (fused(stack), stack))
    assert not packings
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("norm", [True, False])
def test_padded_rows_of_inference_are_those_of_torch(norm, dtype):
    """Without packing, padded rows equal those of torch's inference path for any mask dtype."""
    ignored = IGNORED["right"]
    call = ignored if dtype == torch.bool else torch.zeros_like(ignored, dtype=dtype)
    call = call.masked_fill(ignored, 1 if dtype == torch.bool else -torch.inf)
    stack, x = encoder(norm, embed=8, heads=2).eval(), randn(BATCH, LENGTH, 8)
    with torch.no_grad():
        out = padded(fused(stack), x, src_key_padding_mask=call)
        torch.testing.assert_close(out, stack(x, src_key_padding_mask=call))


def test_training_without_gradients_is_packed(packings, monkeypatch):
    """In training mode, batches are packed without gradients too, as in reentrant checkpoints."""
    limits = small_calls.limits._replace(packing_forward=1 << 40)
    monkeypatch.setattr(small_calls, "limits", limits)
    stack, x = fused(encoder()), batch()
    for training in (True, False):
        with torch.no_grad():
            stack.train(training)(x, src_key_padding_mask=IGNORED["right"])
        assert len(packings) == 1


def test_hooks_get_the_masks_of_the_call():
    """Hooks of layers and attention get the padding mask that was passed to the stack."""
    stack, x, seen = fused(encoder()), batch(), []

    def note(module, args, kwargs):
        seen.extend(v for k, v in kwargs.items() if k.endswith("key_padding_mask"))

    stack.layers[1].register_forward_pre_hook(note, with_kwargs=True)
    stack.layers[1].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    stack(x, src_key_padding_mask=IGNORED["left"])
    assert len(seen) == 2 and all(torch.equal(mask, IGNORED["left"]) for mask in seen)


def test_little_padding_is_not_packed(packings):
    ignored = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    ignored[0, -1] = True
    out = fused(encoder())(batch(), src_key_padding_mask=ignored)
    assert not packings and not out[0, -1].any()


def test_compiled_stacks_are_not_packed_by_default():
    stack, backend = fused(encoder()), Recorded()
    x, ignored = batch(), IGNORED["right"]
    compiled = torch.compile(stack, fullgraph=True, backend=backend)
    expected = stack(x, src_key_padding_mask=ignored)
    torch.testing.assert_close(compiled(x, src_key_padding_mask=ignored), expected)
    assert not backend.packs()


def trained(stack, module, x, call):
    """Return the output of a module, and the gradients of a loss for x and the stack."""
    out = module(x, **call)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((out * weight).sum(), (x, *stack.parameters()))


@pytest.mark.parametrize(
    ("is_causal", "batch_first", "dynamic"),
    [
        (False, True, None),
        pytest.param(True, False, None, marks=pytest.mark.thorough),
        pytest.param(False, False, True, marks=pytest.mark.thorough),
    ],
)
def test_compiled_stacks_are_packed_with_dynamic_sizes(is_causal, batch_first, dynamic, any_size):
    """With data-dependent sizes, full graphs pack and match the uncompiled stack."""
    stack, backend = fused(encoder(batch_first=batch_first)), Recorded()
    compiled = torch.compile(stack, fullgraph=True, backend=backend, dynamic=dynamic)
    whole = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    for ignored in (*IGNORED.values(), ~whole, whole):
        call = {"src_key_padding_mask": ignored, **MASKS["hint" if is_causal else "none"]()}
        case = batch(batch_first), call
        torch.testing.assert_close(trained(stack, compiled, *case), trained(stack, stack, *case))
    assert backend.packs()


@pytest.mark.parametrize("with_mask", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_stacks_are_packed_after_a_graph_break(with_mask, packings):
    """Compiled stacks pack after a graph break, and match the uncompiled stack.

    After two packed batches and one without padding, further batches need no new graph.
    """
    stack, backend = fused(encoder()), Recorded()
    torch.compiler.reset()
    compiled = torch.compile(stack, backend=backend)
    graphs = []
    for lengths in ([LENGTH, 3], [LENGTH, 1, 4], [LENGTH] * 2, [LENGTH, 2], [LENGTH, 5, 2, 2]):
        x = randn(len(lengths), LENGTH, EMBED)
        call = {"src_key_padding_mask": torch.arange(LENGTH) >= torch.tensor(lengths)[:, None]}
        if with_mask:
            call["mask"] = torch.linspace(-1, 1, LENGTH**2, dtype=x.dtype).view(LENGTH, LENGTH)
        expected = trained(stack, stack, x, call)
        torch.testing.assert_close(trained(stack, compiled, x, call), expected)
        graphs.append(len(backend.graphs))
    assert len(packings) == 8, "neither module packs a batch without padding"
    assert graphs[-1] == graphs[2], graphs
    torch.compiler.reset()


@pytest.mark.thorough
def test_compiled_packing_with_dropout(any_size):
    stack = fused(encoder(dropout=0.5))
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    x, ignored = batch(), IGNORED["right"]
    first, second = (compiled(x, src_key_padding_mask=ignored) for _ in range(2))
    assert not torch.equal(first, second)
    assert not first[ignored].any()


@pytest.mark.sampled("one reason is enough for make test", why=["mask", "hooks"])
@pytest.mark.parametrize("why", ["mask", "disabled", "hooks"])
def test_graphs_that_are_not_packed(why, any_size):
    """Compiled graphs do not pack with an (L, L) mask, with a hook, or if packing is disabled.

    With an (L, L) mask, packing requires padding at the end, which a graph cannot check.
    """
    stack, backend, call = fused(encoder()), Recorded(), {"src_key_padding_mask": IGNORED["right"]}
    if why == "mask":
        call["mask"] = randn(LENGTH, LENGTH)
    elif why == "disabled":
        stack.enable_nested_tensor = False
    else:
        stack.layers[0].norm1.register_forward_hook(lambda module, args, out: out)
    x = batch()
    compiled = torch.compile(stack, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, **call), stack(x, **call))
    assert not backend.packs()


def test_exported_graphs_are_not_packed(any_size):
    stack, call = fused(encoder()).eval(), {"src_key_padding_mask": IGNORED["right"]}
    x = batch()
    for strict in (True, False):
        graph = torch.export.export(stack, (x,), call, strict=strict)
        assert not any("nonzero" in str(node.target) for node in graph.graph.nodes)
        torch.testing.assert_close(graph.module()(x, **call), stack(x, **call))


def test_meta_tensors():
    stack = fused(encoder()).to("meta")
    x = torch.empty(BATCH, LENGTH, EMBED, dtype=torch.float64, device="meta")
    out = stack(x, src_key_padding_mask=IGNORED["right"].to("meta"))
    assert out.shape == x.shape


def test_unbatched_inputs():
    stack, x = fused(encoder()), randn(LENGTH, EMBED)
    outs = [stack(x, src_key_padding_mask=IGNORED["right"][i]) for i in (0, slice(0, 1))]
    assert outs[0].shape == outs[1].shape == x.shape
    assert torch.equal(*outs) and not outs[0][4:].any()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(LENGTH, BATCH), (BATCH, LENGTH + 1), (BATCH - 1, LENGTH)])
def test_padding_mask_of_the_wrong_shape(shape, batch_first):
    """A wrong shape of the padding mask is an error, even with the correct number of elements."""
    ignored = torch.zeros(shape, dtype=torch.bool)
    ignored[:, 1:] = True
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(N, S\) = \(3, 9\)"):
        fused(encoder(batch_first=batch_first))(batch(batch_first), src_key_padding_mask=ignored)
