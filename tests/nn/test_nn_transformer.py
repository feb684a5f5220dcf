"""Transformer layers and stacks against torch.nn."""

import copy

import pytest
import torch
from enable_helpers import spy_on_masks
from nn_helpers import (
    BATCH,
    EMBED,
    HEADS,
    LEN_K,
    LEN_Q,
    assert_equal_in_float64,
    assert_within_contract,
    cast,
    causal_bias,
    check_against_torch,
    perturb,
    randn,
    random_mask,
    run,
    sequence,
)

import fused_attn.nn as fnn
from fused_attn.nn import transformer as fused_transformer

# ---- layers --------------------------------------------------------------------------------------


LAYERS = {
    "post": {},
    "pre": {"norm_first": True},
    "gelu": {"activation": "gelu", "batch_first": True},
    "callable": {"activation": torch.nn.functional.silu, "norm_first": True, "batch_first": True},
    "no_bias": {"bias": False, "layer_norm_eps": 0.1},
}
SELF_MASKS = {
    "none": dict,
    "padding": lambda: {"src_key_padding_mask": random_mask("bool", BATCH, LEN_Q)},
    "learned": lambda: {"src_mask": random_mask("learned", LEN_Q, LEN_Q)},
    "both": lambda: {
        "src_mask": random_mask("bool", BATCH * HEADS, LEN_Q, LEN_Q),
        "src_key_padding_mask": random_mask("bool", BATCH, LEN_Q),
    },
    "causal": lambda: {"src_mask": causal_bias(LEN_Q), "is_causal": True},
}


@pytest.mark.parametrize("mask", SELF_MASKS)
@pytest.mark.parametrize("constructor", LAYERS)
def test_encoder_layer(constructor, mask):
    kwargs = LAYERS[constructor]
    theirs = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, **kwargs)
    theirs = perturb(theirs.double())
    x = sequence(kwargs, LEN_Q)
    check_against_torch(theirs, fnn.TransformerEncoderLayer, (x,), SELF_MASKS[mask]())


def test_encoder_layer_unbatched():
    theirs = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0).double()
    kwargs = {"src_key_padding_mask": random_mask("bool", LEN_Q)}
    args = (randn(LEN_Q, EMBED),)
    check_against_torch(perturb(theirs), fnn.TransformerEncoderLayer, args, kwargs)


@pytest.mark.parametrize("mask", ["none", "padding", "causal"])
@pytest.mark.parametrize("constructor", LAYERS)
def test_decoder_layer(constructor, mask):
    kwargs = LAYERS[constructor]
    theirs = torch.nn.TransformerDecoderLayer(EMBED, HEADS, 16, dropout=0.0, **kwargs)
    theirs = perturb(theirs.double())
    args = (sequence(kwargs, LEN_Q), sequence(kwargs, LEN_K))
    call = {}
    if mask != "none":
        call = {
            "tgt_mask": causal_bias(LEN_Q),
            "memory_key_padding_mask": random_mask("bool", BATCH, LEN_K),
            "memory_mask": random_mask("bool", LEN_Q, LEN_K),
            "tgt_is_causal": mask == "causal",
        }
    check_against_torch(theirs, fnn.TransformerDecoderLayer, args, call)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_respects_each_dropout(norm_first):
    """Each dropout of a layer acts on the same branch as in torch, which p = 1 sets to 0."""
    x = randn(LEN_Q, BATCH, EMBED)
    for name in ("dropout", "dropout1", "dropout2"):
        theirs = torch.nn.TransformerEncoderLayer(
            EMBED, HEADS, 16, dropout=0.0, norm_first=norm_first
        )
        theirs = perturb(theirs.double())
        plain = run(theirs, (x,))["out0"]
        getattr(theirs, name).p = 1.0
        ours = fnn.TransformerEncoderLayer.from_torch(theirs)
        expected = run(theirs, (x,))
        assert not torch.allclose(expected["out0"], plain)
        assert_equal_in_float64(run(ours, (x,)), expected)
        getattr(ours, name).eval()
        assert_equal_in_float64({"out": run(ours, (x,))["out0"]}, {"out": plain})


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_dropout_rate(norm_first):
    """Fused dropout keeps about (1 - p) of the sublayer's output, scaled by 1 / (1 - p)."""
    layer = fnn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, norm_first=norm_first)
    layer.double()
    layer.dropout1.p = 0.25
    norm = layer.norm2 if norm_first else layer.norm1
    sums = []
    forward = norm.forward

    def record(*args, **kwargs):
        out, total = forward(*args, **{**kwargs, "return_residual": True})
        sums.append((args[0], kwargs["residual"], total))
        return (out, total) if kwargs.get("return_residual") else out

    record.takes_residual = True  # otherwise the layer computes dropout, sum and norm separately
    norm.forward = record
    layer(randn(500, BATCH, EMBED))
    ((sublayer, residual, total),) = sums
    kept = (total - residual).abs() > 1e-12
    assert abs(kept.double().mean() - 0.75) < 0.01
    torch.testing.assert_close((total - residual)[kept], (sublayer / 0.75)[kept])


@pytest.mark.parametrize("norm_first", [False, True])
def test_patched_forwards_are_called(norm_first):
    layer = fnn.TransformerEncoderLayer(EMBED, HEADS, 16, norm_first=norm_first)
    calls = []
    for name in ("norm1", "norm2", "dropout1", "dropout2"):
        layer.get_submodule(name).forward = lambda x, name=name: calls.append(name) or x
    layer(randn(LEN_Q, BATCH, EMBED).float())
    assert sorted(calls) == ["dropout1", "dropout2", "norm1", "norm2"]


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_hooks_see_what_torch_shows_them(norm_first):
    theirs = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, norm_first=norm_first)
    theirs = perturb(theirs.double())
    ours = fnn.TransformerEncoderLayer.from_torch(copy.deepcopy(theirs))
    x = randn(LEN_Q, BATCH, EMBED)
    seen = {}
    for label, layer in (("theirs", theirs), ("ours", ours)):
        for name in ("norm1", "norm2", "dropout1", "dropout2", "self_attn"):
            key = (label, name)
            layer.get_submodule(name).register_forward_hook(
                lambda _, args, out, key=key: seen.__setitem__(key, (args[0], out))
            )
    assert_equal_in_float64(run(ours, (x,)), run(theirs, (x,)))
    for name in ("norm1", "norm2", "dropout1", "dropout2", "self_attn"):
        torch.testing.assert_close(seen["ours", name], seen["theirs", name])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("other", ["identity", "torch", "batch_norm_like", "rms"])
def test_layer_with_another_norm(other, norm_first):
    class Scale(torch.nn.Module):
        def forward(self, x):
            return 0.5 * x

    theirs = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, norm_first=norm_first)
    theirs = perturb(theirs.double())
    ours = fnn.TransformerEncoderLayer.from_torch(copy.deepcopy(theirs))
    replacement = {
        "identity": torch.nn.Identity,
        "torch": lambda: torch.nn.LayerNorm(EMBED).double(),
        "batch_norm_like": Scale,
        "rms": lambda: torch.nn.RMSNorm(EMBED).double(),
    }[other]()
    theirs.norm1 = theirs.norm2 = replacement
    if other == "rms":
        replacement = fnn.RMSNorm.from_torch(replacement)
    ours.norm1 = ours.norm2 = replacement
    x = randn(LEN_Q, BATCH, EMBED)
    assert_equal_in_float64(run(ours, (x,)), run(theirs, (x,)))


def test_layer_under_autocast():
    theirs = perturb(torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0))
    x = randn(LEN_Q, BATCH, EMBED, dtype=torch.float32)
    truth = run(copy.deepcopy(theirs).double(), cast((x,), torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(theirs, (x,))
        actual = run(fnn.TransformerEncoderLayer.from_torch(theirs), (x,))
    assert_within_contract(actual, eager, truth)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layer_under_checkpoint_draws_the_same_dropout(use_reentrant):
    layer = fnn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.5).double()
    x = randn(LEN_Q, BATCH, EMBED)
    torch.manual_seed(1)
    expected = layer(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
    assert torch.equal(out, expected)
    out.sum().backward()
    torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("name", ["_sa_block", "_ff_block"])
def test_layer_subclass_must_not_override_blocks_that_are_not_called(name):
    with pytest.raises(TypeError, match=f"must not override {name}"):
        type("Mine", (fnn.TransformerEncoderLayer,), {name: lambda self, x: x})


# ---- stacks --------------------------------------------------------------------------------------


def encoder_pair(**kwargs):
    layer = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, **kwargs)
    norm = torch.nn.LayerNorm(EMBED)
    theirs = torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    return perturb(theirs.double())


@pytest.mark.sampled("every mask runs in both layouts", norm_first=[True], batch_first=[True])
@pytest.mark.sampled("every mask runs with pre- and post-norm", norm_first=[False], padding=[False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "bool3d", "learned", "causal", "causal_bool"])
@pytest.mark.parametrize("padding", [False, True])
def test_encoder(norm_first, batch_first, mask, padding):
    kwargs = {"norm_first": norm_first, "batch_first": batch_first}
    call = {
        "none": dict,
        "bool": lambda: {"mask": random_mask("bool", LEN_Q, LEN_Q)},
        "bool3d": lambda: {"mask": random_mask("bool", BATCH * HEADS, LEN_Q, LEN_Q)},
        "learned": lambda: {"mask": random_mask("learned", LEN_Q, LEN_Q)},
        "causal": lambda: {"mask": causal_bias(LEN_Q)},
        "causal_bool": lambda: {"mask": causal_bias(LEN_Q).isinf()},
    }[mask]()
    if padding:
        kind = "float" if mask in ("learned", "causal") else "bool"
        call["src_key_padding_mask"] = random_mask(kind, BATCH, LEN_Q)
    theirs = encoder_pair(**kwargs)
    check_against_torch(theirs, fnn.TransformerEncoder, (sequence(kwargs, LEN_Q),), call)


@pytest.mark.parametrize("hint", [None, True])
def test_encoder_keeps_causal_and_padding_as_structure(monkeypatch, hint):
    seen = spy_on_masks(monkeypatch)
    ours = fnn.TransformerEncoder.from_torch(encoder_pair())
    padding = torch.tensor([[False] * LEN_Q, [False] * 3 + [True] * 2])
    x = randn(LEN_Q, BATCH, EMBED)
    ours(x, mask=causal_bias(LEN_Q), src_key_padding_mask=padding, is_causal=hint)
    assert len(seen) == 2
    assert seen[0] is seen[1], "the layers do not share one mask"
    mask = seen[0]
    assert len(mask.bands) == 1
    assert not mask.biases
    assert [tuple(m.shape) for m in mask.dense_masks] == [(BATCH, 1, 1, LEN_Q)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_is_causal_mask(dtype):
    mask = causal_bias(4).isinf() if dtype == torch.bool else causal_bias(4, dtype)
    assert fused_transformer.is_causal_mask(mask, None)
    assert not fused_transformer.is_causal_mask(mask, False)
    assert fused_transformer.is_causal_mask(None, True)
    assert not fused_transformer.is_causal_mask(None, None)
    assert not fused_transformer.is_causal_mask(mask.T, None)
    assert not fused_transformer.is_causal_mask(mask[:3], None)
    if dtype != torch.bool:
        assert not fused_transformer.is_causal_mask(mask.clone().requires_grad_(), None)
    almost = mask.clone()
    almost[3, 0] = True if dtype == torch.bool else -1.0
    assert not fused_transformer.is_causal_mask(almost, None)
    almost = mask.clone()
    almost[0, 3] = False if dtype == torch.bool else torch.finfo(dtype).min
    assert not fused_transformer.is_causal_mask(almost, None)


def test_encoder_of_layers_with_appended_keys():
    """An encoder whose layers append keys (add_bias_kv) matches torch's.

    Such layers cannot share one Mask, because it would mask the appended keys.
    """
    theirs = encoder_pair()
    for layer in theirs.layers:
        layer.self_attn = torch.nn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True).double()
    call = {"mask": causal_bias(LEN_Q), "is_causal": False}
    check_against_torch(theirs, fnn.TransformerEncoder, (randn(LEN_Q, BATCH, EMBED),), call)


def test_encoder_of_other_layers_gets_what_torch_would_pass():
    class Custom(torch.nn.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            seen.append((src_mask, src_key_padding_mask, is_causal))
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

    seen = []
    stack = fnn.TransformerEncoder(Custom(EMBED, HEADS, 16, dropout=0.0), 2)
    mask, padding = causal_bias(LEN_Q, torch.float32), torch.zeros(BATCH, LEN_Q)
    stack(torch.randn(LEN_Q, BATCH, EMBED), mask, padding)
    assert len(seen) == 2
    for got_mask, got_padding, is_causal in seen:
        assert got_mask is mask
        assert got_padding is padding
        assert is_causal is True


def test_fused_layers_inside_a_torch_encoder_in_inference():
    """In inference, fused layers accept the nested tensors that torch's stack passes to them."""
    layer = fnn.TransformerEncoderLayer(EMBED, 4, 16, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2).eval()
    assert stack.use_nested_tensor
    x = torch.randn(BATCH, LEN_Q, EMBED)
    padding = torch.tensor([[False] * LEN_Q, [False] * 3 + [True] * 2])
    expected = fnn.TransformerEncoder.from_torch(stack)(x, src_key_padding_mask=padding)
    with torch.no_grad():
        actual = stack(x, src_key_padding_mask=padding)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual[~padding], expected[~padding])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_transformer(norm_first, batch_first, masked):
    kwargs = {"norm_first": norm_first, "batch_first": batch_first}
    theirs = torch.nn.Transformer(EMBED, HEADS, 1, 2, 16, dropout=0.0, **kwargs)
    theirs = perturb(theirs.double())
    call = {}
    if masked:
        padding = random_mask("bool", BATCH, LEN_K)
        call = {
            "tgt_mask": causal_bias(LEN_Q).isinf(),
            "src_key_padding_mask": padding,
            "memory_key_padding_mask": padding,
            "tgt_key_padding_mask": random_mask("bool", BATCH, LEN_Q),
        }
    args = (sequence(kwargs, LEN_K), sequence(kwargs, LEN_Q))
    check_against_torch(theirs, fnn.Transformer, args, call)


def test_transformer_unbatched():
    theirs = perturb(torch.nn.Transformer(EMBED, HEADS, 1, 1, 16, dropout=0.0).double())
    call = {
        "tgt_mask": causal_bias(LEN_Q),
        "memory_key_padding_mask": random_mask("float", LEN_K),
    }
    args = (randn(LEN_K, EMBED), randn(LEN_Q, EMBED))
    check_against_torch(theirs, fnn.Transformer, args, call)


def test_transformer_with_a_sequence_of_padding_alone():
    ours = fnn.Transformer(EMBED, HEADS, 1, 1, 16, batch_first=True)
    src, tgt = torch.randn(2, LEN_K, EMBED), torch.randn(2, LEN_Q, EMBED)
    padding = torch.tensor([[False] * LEN_K, [True] * LEN_K])
    out = ours(src, tgt, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())
