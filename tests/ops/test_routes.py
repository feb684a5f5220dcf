"""Attention on plain tensors skips validation; all dispatch paths give identical bits."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import routes
import torch
from helpers import DTYPES, short
from routes import ROUTES, checked_first
from torch.utils.checkpoint import checkpoint

from fused_attn import functional as F
from fused_attn import masks, nn, varlen_attention

LENGTHS = torch.tensor([19, 7])
MASKS = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "padding": lambda: {"attn_mask": masks.padding(LENGTHS)},
    "bool": lambda: {"attn_mask": torch.rand(2, 1, 23, 19) < 0.6},
    "keys": lambda: {"attn_mask": torch.arange(19) < LENGTHS[:, None, None, None]},
    "bias": lambda: {"attn_mask": torch.randn(4, 23, 19)},
    "alibi": lambda: {"attn_mask": masks.alibi(torch.rand(4))},
}
validated = routes.looked_at  # fixture: list of the calls that were validated


def tensors(dtype, heads_kv=4, layout="bhld"):
    shapes = ((2, 4, 23, 16), (2, heads_kv, 19, 16), (2, heads_kv, 19, 24))
    qkv = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if layout == "blhd":
        qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    return [t.requires_grad_() for t in qkv]


def inferred(leaves, **options):
    torch.manual_seed(7)
    with torch.no_grad():
        return (F.scaled_dot_product_attention(*leaves, **options),)


def trained(leaves, **options):
    torch.manual_seed(7)
    out = F.scaled_dot_product_attention(*leaves, **options)
    torch.manual_seed(8)
    return out, *torch.autograd.grad(out, leaves, torch.randn_like(out))


def assert_same_bits(first, *others):
    """Assert that all results, tensors or tuples, have equal values and strides."""
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("mask", MASKS)
def test_every_route_gives_the_same_bits(mask, dropout_p, dtype, validated):
    options = MASKS[mask]() | {"dropout_p": dropout_p}
    for heads_kv in (4, 2):
        options["enable_gqa"] = heads_kv == 2
        for layout in ("bhld", "blhd"):
            leaves = tensors(dtype, heads_kv, layout)
            results = [trained(leaves, **options) + inferred(leaves, **options)]
            assert not validated
            for route in ROUTES.values():
                with route():
                    out_and_grads = trained(leaves, **options, backend="cpp")
                    results.append(out_and_grads + inferred(leaves, **options))
            assert_same_bits(*results)
            validated.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"scale": 0.3}, {"scale": 2}, {"return_lse": True}, {"bias": True}],
    ids=str,
)
def test_options_do_not_need_validation(options, dtype, validated):
    options, leaves = dict(options), tensors(dtype)
    if options.pop("bias", False):
        leaves.append(torch.randn(4, 1, 19, requires_grad=True))
    results = []
    for route in ROUTES.values():
        with route():
            out = F.scaled_dot_product_attention(*leaves, **options)
            outs = out if isinstance(out, tuple) else (out,)
            grads = [torch.ones_like(o) for o in outs]
            results.append((*outs, *torch.autograd.grad(outs, leaves, grads)))
        if len(results) == 1:
            assert not validated
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.sum(),
        lambda out: out[:, :, 3].sum(),
        lambda out: out.transpose(2, 3).square().sum(),
        lambda out: (out * torch.ones(1).expand_as(out)).sum(),
    ],
    ids=["expanded", "part", "transposed", "product"],
)
def test_output_gradients_of_any_layout(loss):
    leaves = tensors(torch.float64)
    results = []
    for route in ROUTES.values():
        with route():
            out = F.scaled_dot_product_attention(*leaves)
            results.append(torch.autograd.grad(loss(out), leaves))
    assert_same_bits(*results)


def test_some_gradients_and_retained_graphs(validated):
    query, key, value = tensors(torch.float32)
    query.requires_grad_(False)
    loss = F.scaled_dot_product_attention(query, key, value).sum()
    first = torch.autograd.grad(loss, (key, value), retain_graph=True)
    assert_same_bits(first, torch.autograd.grad(loss, (key, value)))
    assert not validated
    tied = key.detach().requires_grad_()
    losses = [F.scaled_dot_product_attention(tied, tied, tied).sum()]
    with checked_first():
        losses.append(F.scaled_dot_product_attention(tied, tied, tied).sum())
    torch.testing.assert_close(*(torch.autograd.grad(loss, tied) for loss in losses))


@pytest.mark.parametrize("changed", ["query", "mask"])
def test_changes_before_the_backward_are_errors(changed, validated):
    query, key, value = tensors(torch.float32)
    mask = torch.rand(2, 1, 23, 19) < 0.6
    inner = query * 1
    out = F.scaled_dot_product_attention(inner, key, value, mask)
    assert not validated
    with torch.no_grad():
        (inner if changed == "query" else mask).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


CHANGES = {
    "float64": lambda t: t.to(torch.float64),
    "float16": lambda t: t.to(torch.float16),
    "strides": lambda t: t.mT.contiguous().mT,
}


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("route", ["plain", "checked first"])
def test_saved_tensors_that_hooks_change(route, change, which):
    """The backward accepts saved tensors whose dtype or strides were changed by hooks."""
    leaves, unpacked = tensors(torch.bfloat16), []

    def unpack(tensor):
        unpacked.append(tensor)
        return change(tensor) if len(unpacked) == which + 1 else tensor

    with ROUTES[route](), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = F.scaled_dot_product_attention(*leaves)
    got = [grad.bfloat16() for grad in torch.autograd.grad(out.sum(), leaves)]
    assert len(unpacked) > which
    want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sum(), leaves)
    torch.testing.assert_close(got, list(want), rtol=0.1, atol=0.1)


def test_checkpoints_repeat_the_dropout_mask(validated):
    leaves, results = tensors(torch.float32), []
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=0.4)
    for run in (attend, functools.partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(2)
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert not validated
    assert_same_bits(*results)


def test_calls_that_are_validated(validated):
    query, key, value = tensors(torch.float32)
    calls = (
        lambda: F.scaled_dot_product_attention(query[0], key[0], value[0]),
        lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.5, seed=3),
        lambda: F.scaled_dot_product_attention(query.mT, query.mT, query.mT),
    )
    for number, call in enumerate(calls, 1):
        call().sum().backward()
        assert len(validated) == number


CU_SEQLENS = torch.tensor([0, 9, 9, 30, 47], dtype=torch.int32)


def packed(dtype, heads_kv=4):
    return [torch.randn(47, heads, 16).to(dtype) for heads in (4, heads_kv, heads_kv)]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("int_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "alibi"])
def test_packed(mask, int_type, dtype, validated):
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "window": {"attn_mask": masks.sliding_window(3, 2)},
        "alibi": {"attn_mask": masks.alibi(torch.rand(4)), "is_causal": True},
    }[mask]
    ends = CU_SEQLENS.to(int_type)
    for heads_kv in (4, 2):
        qkv = packed(dtype, heads_kv)
        results = [varlen_attention(*qkv, ends, ends, 21, 30, **options) for _ in range(2)]
        assert not validated
        for route in ROUTES.values():
            with route():
                results.append(varlen_attention(*qkv, ends, ends, 21, 30, **options))
        sliced = [torch.cat([t, t], 2)[..., :16] for t in qkv]
        results.append(varlen_attention(*sliced, ends, ends, 21, 30, **options))
        assert_same_bits(*results)
        validated.clear()


def test_packed_lengths_are_checked(validated):
    query, key, value = packed(torch.float32)
    ends = CU_SEQLENS.clone()
    varlen_attention(query, key, value, ends, ends, 21, 21)
    for call in (
        lambda: varlen_attention(query[:-1], key, value, ends, ends, 21, 21),
        lambda: varlen_attention(query, key, value, ends, ends, 20, 21),
        lambda: varlen_attention(query, key, value, ends, ends[1:], 21, 21),
    ):
        with pytest.raises(ValueError, match="cu_seqlens"):
            call()
    ends[2] = 12  # the change in place invalidates cached values
    got = varlen_attention(query, key, value, ends, ends, 21, 21)
    want = varlen_attention(query, key, value, ends.clone(), ends.clone(), 21, 21)
    assert torch.equal(got, want) and not validated


def test_values_cached_for_cu_seqlens_do_not_keep_the_tensor_alive():
    ends = CU_SEQLENS.to(torch.int64)
    reference = weakref.ref(ends)
    varlen_attention(*packed(torch.float32), ends, ends, 21, 21)
    del ends
    gc.collect()
    assert reference() is None


def test_encoder_layers_on_packed_tokens_need_no_validation(validated):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    ignored = torch.arange(12) >= torch.tensor([12, 5, 3])[:, None]
    with torch.no_grad():
        encoder(torch.randn(3, 12, 16), src_key_padding_mask=ignored)
    assert not validated


def test_expanded_masks_need_no_validation(validated):
    qkv = tensors(torch.float32)
    padding = torch.arange(19) < torch.tensor([19, 9]).view(2, 1, 1, 1)
    want = F.scaled_dot_product_attention(*qkv, padding)
    for mask in (padding.expand(2, 1, 23, 19), padding.expand(-1, 4, -1, -1)):
        got = F.scaled_dot_product_attention(*qkv, mask)
        assert torch.equal(got, want)
        torch.autograd.grad(got.sum(), qkv)
    bias = torch.randn(1, 1, 1, 19)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(*qkv, bias.expand(2, -1, 23, -1)),
        F.scaled_dot_product_attention(*qkv, bias),
    )
    learned = bias.clone().requires_grad_()
    out = F.scaled_dot_product_attention(*qkv, learned.expand(-1, -1, 23, -1))
    assert torch.autograd.grad(out.sum(), learned)[0].shape == bias.shape
    assert not validated


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_packed_training_needs_no_validation(dtype, validated):
    leaves = [t.requires_grad_() for t in packed(dtype, heads_kv=2)]

    def step(**options):
        ends = CU_SEQLENS.long()
        out, lse = varlen_attention(
            *leaves, ends, ends, 21, 21, is_causal=True, return_lse=True, **options
        )
        return out, lse, *torch.autograd.grad((out * out).sum() + lse.exp().sum(), leaves)

    results = [step()]
    assert not validated
    with checked_first():
        results.append(step(backend="cpp"))
    assert_same_bits(*results)
