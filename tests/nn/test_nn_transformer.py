"""Transformer layers and stacks against torch.nn."""

import copy
import itertools

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


def encoder_layer(**kwargs):
    layer = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, **kwargs)
    return perturb(layer.double())


@pytest.mark.parametrize("mask", SELF_MASKS)
@pytest.mark.parametrize("constructor", LAYERS)
def test_encoder_layer(constructor, mask):
    theirs, x = encoder_layer(**LAYERS[constructor]), sequence(LAYERS[constructor], LEN_Q)
    check_against_torch(theirs, fnn.TransformerEncoderLayer, (x,), SELF_MASKS[mask]())


def test_encoder_layer_unbatched():
    args, kwargs = (randn(LEN_Q, EMBED),), {"src_key_padding_mask": random_mask("bool", LEN_Q)}
    check_against_torch(encoder_layer(), fnn.TransformerEncoderLayer, args, kwargs)


@pytest.mark.parametrize("mask", ["none", "causal", "hinted"])
@pytest.mark.parametrize("constructor", LAYERS)
def test_decoder_layer(constructor, mask):
    kwargs = LAYERS[constructor]
    theirs = torch.nn.TransformerDecoderLayer(EMBED, HEADS, 16, dropout=0.0, **kwargs)
    theirs = perturb(theirs.double())
    args = (sequence(kwargs, LEN_Q), sequence(kwargs, LEN_K))
    call = {
        "tgt_mask": causal_bias(LEN_Q),
        "memory_key_padding_mask": random_mask("bool", BATCH, LEN_K),
        "memory_mask": random_mask("bool", LEN_Q, LEN_K),
        "tgt_is_causal": mask == "hinted",
    }
    call = {} if mask == "none" else call
    check_against_torch(theirs, fnn.TransformerDecoderLayer, args, call)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_respects_each_dropout(norm_first):
    """Each dropout of a layer acts on the same branch as in torch, which p=1 sets to 0."""
    x = randn(LEN_Q, BATCH, EMBED)
    for name in ("dropout", "dropout1", "dropout2"):
        theirs = encoder_layer(norm_first=norm_first)
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
    """Dropout in the norm keeps 1 - p of the sublayer's output and scales it by 1 / (1 - p)."""
    layer = fnn.TransformerEncoderLayer.from_torch(encoder_layer(norm_first=norm_first))
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
def test_layer_hooks_get_the_tensors_of_torch(norm_first):
    theirs = encoder_layer(norm_first=norm_first)
    ours = fnn.TransformerEncoderLayer.from_torch(copy.deepcopy(theirs))
    x = randn(LEN_Q, BATCH, EMBED)
    names = "norm1", "norm2", "dropout1", "dropout2", "self_attn"
    seen = {theirs: {}, ours: {}}
    for layer, name in itertools.product(seen, names):
        layer.get_submodule(name).register_forward_hook(
            lambda _, args, out, key=(layer, name): seen[key[0]].update({key[1]: (args[0], out)})
        )
    assert_equal_in_float64(run(ours, (x,)), run(theirs, (x,)))
    assert set(seen[ours]) == set(names)
    torch.testing.assert_close(seen[ours], seen[theirs])


class Scale(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("norm", "fused"),
    [
        (Scale(), None),
        (torch.nn.LayerNorm(EMBED).double(), None),
        (torch.nn.RMSNorm(EMBED).double(), fnn.RMSNorm),
    ],
    ids=["custom", "torch", "rms"],
)
def test_layer_with_another_norm(norm, fused, norm_first):
    theirs = encoder_layer(norm_first=norm_first)
    ours = fnn.TransformerEncoderLayer.from_torch(copy.deepcopy(theirs))
    theirs.norm1 = theirs.norm2 = norm
    ours.norm1 = ours.norm2 = norm if fused is None else fused.from_torch(norm)
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
def test_layer_subclasses_must_not_override_unused_methods(name):
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
def test_encoder_passes_a_causal_band_and_a_padding_mask(monkeypatch, hint):
    seen = spy_on_masks(monkeypatch)
    ours = fnn.TransformerEncoder.from_torch(encoder_pair())
    padding = torch.tensor([[False] * LEN_Q, [False] * 3 + [True] * 2])
    x = randn(LEN_Q, BATCH, EMBED)
    ours(x, mask=causal_bias(LEN_Q), src_key_padding_mask=padding, is_causal=hint)
    assert len(seen) == 2
    mask = seen[0]
    assert seen[1] is mask, "the layers do not share one mask"
    assert len(mask.bands) == 1
    assert not mask.biases
    assert [tuple(m.shape) for m in mask.dense_masks] == [(BATCH, 1, 1, LEN_Q)]


def test_encoder_of_layers_with_appended_keys():
    """Layers that append keys (add_bias_kv) match torch's, although they cannot share a Mask."""
    theirs = encoder_pair()
    for layer in theirs.layers:
        layer.self_attn = torch.nn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True).double()
    call = {"mask": causal_bias(LEN_Q), "is_causal": False}
    check_against_torch(theirs, fnn.TransformerEncoder, (randn(LEN_Q, BATCH, EMBED),), call)


def test_encoder_of_other_layers_passes_the_arguments_of_torch():
    class Custom(torch.nn.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            seen.append((src_mask, src_key_padding_mask, is_causal))
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

    seen = []
    stack = fnn.TransformerEncoder(Custom(EMBED, HEADS, 16, dropout=0.0), 2)
    mask, padding = causal_bias(LEN_Q, torch.float32), torch.zeros(BATCH, LEN_Q)
    stack(torch.randn(LEN_Q, BATCH, EMBED), mask, padding)
    assert len(seen) == 2
    for got in seen:
        assert got[0] is mask and got[1] is padding and got[2] is True


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
