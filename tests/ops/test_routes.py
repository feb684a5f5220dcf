"""Attention on plain tensors skips validation; all dispatch paths give identical bits."""

from __future__ import annotations

import pytest
import routes
import torch
from helpers import DTYPES, short
from routes import ROUTES, checked_first

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


looked_at = routes.looked_at


def tensors(dtype, heads_kv=4, layout="bhld"):
    shapes = ((2, 4, 23, 16), (2, heads_kv, 19, 16), (2, heads_kv, 19, 24))
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if layout == "blhd":
        made = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return [t.requires_grad_() for t in made]


def inferred(leaves, **options):
    torch.manual_seed(7)
    with torch.no_grad():
        return (F.scaled_dot_product_attention(*leaves, **options),)


def trained(leaves, **options):
    torch.manual_seed(7)
    out = F.scaled_dot_product_attention(*leaves, **options)
    torch.manual_seed(8)
    return out, *torch.autograd.grad(out, leaves, torch.randn_like(out))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("mask", MASKS)
def test_every_route_gives_the_same_bits(mask, dropout_p, dtype, looked_at):
    options = MASKS[mask]() | {"dropout_p": dropout_p}
    for heads_kv in (4, 2):
        for layout in ("bhld", "blhd"):
            leaves = tensors(dtype, heads_kv, layout)
            gqa = {"enable_gqa": heads_kv == 2}
            ours = trained(leaves, **options, **gqa), inferred(leaves, **options, **gqa)
            assert not looked_at
            for route in ROUTES.values():
                with route():
                    other = (
                        trained(leaves, **options, **gqa, backend="cpp"),
                        inferred(leaves, **options, **gqa),
                    )
                for ours_i, other_i in zip(sum(ours, ()), sum(other, ()), strict=True):
                    assert torch.equal(ours_i, other_i)
                    assert ours_i.stride() == other_i.stride()
            looked_at.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"scale": 0.3}, {"scale": 2}, {"return_lse": True}, {"bias": True}],
    ids=str,
)
def test_every_option_takes_the_same_route(options, dtype, looked_at):
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
            assert not looked_at
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "given",
    [
        lambda out: out.sum(),
        lambda out: out[:, :, 3].sum(),
        lambda out: out.transpose(2, 3).square().sum(),
        lambda out: (out * torch.ones(1).expand_as(out)).sum(),
    ],
    ids=["expanded", "part", "transposed", "product"],
)
def test_gradients_of_any_layout(given, looked_at):
    leaves = tensors(torch.float64)
    results = []
    for route in ROUTES.values():
        with route():
            out = F.scaled_dot_product_attention(*leaves)
            results.append(torch.autograd.grad(given(out), leaves))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_some_gradients_and_retained_graphs(looked_at):
    query, key, value = tensors(torch.float32)
    query.requires_grad_(False)
    out = F.scaled_dot_product_attention(query, key, value)
    first = torch.autograd.grad(out.sum(), (key, value), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (key, value))
    assert not looked_at and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    tied = key.detach().requires_grad_()
    ours = F.scaled_dot_product_attention(tied, tied, tied)
    with checked_first():
        other = F.scaled_dot_product_attention(tied, tied, tied)
    grads = [torch.autograd.grad(o.sum(), tied)[0] for o in (ours, other)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("changed", ["query", "mask"])
def test_changes_before_the_backward_are_errors(changed, looked_at):
    query, key, value = tensors(torch.float32)
    mask = torch.rand(2, 1, 23, 19) < 0.6
    inner = query * 1
    out = F.scaled_dot_product_attention(inner, key, value, mask)
    assert not looked_at
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
        return change(tensor) if len(unpacked) - 1 == which else tensor

    with ROUTES[route](), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = F.scaled_dot_product_attention(*leaves)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert len(unpacked) > which
    want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sum(), leaves)
    for got, wanted in zip(grads, want, strict=True):
        torch.testing.assert_close(got.bfloat16(), wanted, rtol=0.1, atol=0.1)


def test_checkpoints_repeat_the_dropout_mask(looked_at):
    leaves = tensors(torch.float32)

    def attend(*qkv):
        return F.scaled_dot_product_attention(*qkv, dropout_p=0.4)

    results = []
    for run in (attend, lambda *t: torch.utils.checkpoint.checkpoint(attend, *t, use_reentrant=0)):
        torch.manual_seed(2)
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert not looked_at
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_calls_that_are_validated(looked_at):
    query, key, value = tensors(torch.float32)
    calls = (
        lambda: F.scaled_dot_product_attention(query[0], key[0], value[0]),
        lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.5, seed=3),
        lambda: F.scaled_dot_product_attention(query.mT, query.mT, query.mT),
    )
    for number, call in enumerate(calls, 1):
        call().sum().backward()
        assert len(looked_at) == number


# ---- packed sequences ---------------------------------------------------------------------------

CU_SEQLENS = torch.tensor([0, 9, 9, 30, 47], dtype=torch.int32)


def packed(dtype, heads_kv=4, width=16):
    total = int(CU_SEQLENS[-1])
    return [torch.randn(total, h, width).to(dtype) for h in (4, heads_kv, heads_kv)]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("int_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "alibi"])
def test_packed(mask, int_type, dtype, looked_at):
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "window": {"attn_mask": masks.sliding_window(3, 2)},
        "alibi": {"attn_mask": masks.alibi(torch.rand(4)), "is_causal": True},
    }[mask]
    ends = CU_SEQLENS.to(int_type)
    for heads_kv in (4, 2):
        qkv = packed(dtype, heads_kv)
        for _ in range(2):  # the second call uses cached values
            ours = varlen_attention(*qkv, ends, ends, 21, 30, **options)
        assert not looked_at
        for route in ROUTES.values():
            with route():
                other = varlen_attention(*qkv, ends, ends, 21, 30, **options)
            assert torch.equal(ours, other)
            assert ours.stride() == other.stride()
        looked_at.clear()
        sliced = [torch.cat([t, t], 2)[..., :16] for t in qkv]
        assert torch.equal(varlen_attention(*sliced, ends, ends, 21, 30, **options), ours)


def test_packed_lengths_are_checked(looked_at):
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
    ours = varlen_attention(query, key, value, ends, ends, 21, 21)
    whole = varlen_attention(query, key, value, ends.clone(), ends.clone(), 21, 21)
    assert torch.equal(ours, whole) and not looked_at


def test_packed_memory_is_not_kept():
    """Values cached for cu_seqlens do not keep the tensor alive."""
    import gc
    import weakref

    query, key, value = packed(torch.float32)
    ends = CU_SEQLENS.to(torch.int64)
    reference = weakref.ref(ends)
    varlen_attention(query, key, value, ends, ends, 21, 21)
    del ends
    gc.collect()
    assert reference() is None


def test_encoder_of_padded_batches(looked_at):
    """Encoder layers that run on packed tokens skip validation in inference."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    ignored = torch.arange(12) >= torch.tensor([12, 5, 3])[:, None]
    with torch.no_grad():
        encoder(torch.randn(3, 12, 16), src_key_padding_mask=ignored)
    assert not looked_at


def test_expanded_masks_need_no_validation(looked_at):
    query, key, value = tensors(torch.float32)
    batch, _, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    padding = torch.arange(seqlen_k) < torch.tensor([[seqlen_k]] * (batch - 1) + [[seqlen_k // 2]])
    padding = padding[:, None, None]
    want = F.scaled_dot_product_attention(query, key, value, padding)
    bias = torch.randn(1, 1, 1, seqlen_k)
    for mask in (padding.expand(batch, 1, seqlen_q, seqlen_k), padding.expand(-1, 4, -1, -1)):
        got = F.scaled_dot_product_attention(query, key, value, mask)
        assert torch.equal(got, want)
        torch.autograd.grad(got.sum(), (query, key, value))
    torch.testing.assert_close(
        F.scaled_dot_product_attention(query, key, value, bias.expand(batch, -1, seqlen_q, -1)),
        F.scaled_dot_product_attention(query, key, value, bias),
    )
    learned = bias.clone().requires_grad_()
    out = F.scaled_dot_product_attention(query, key, value, learned.expand(-1, -1, seqlen_q, -1))
    assert torch.autograd.grad(out.sum(), learned)[0].shape == bias.shape
    assert not looked_at


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_packed_training_needs_no_validation(dtype, looked_at):
    leaves = [t.requires_grad_() for t in packed(dtype, heads_kv=2)]

    def step(**options):
        ends = CU_SEQLENS.long()
        out, lse = varlen_attention(
            *leaves, ends, ends, 21, 21, is_causal=True, return_lse=True, **options
        )
        return out, lse, *torch.autograd.grad((out * out).sum() + lse.exp().sum(), leaves)

    ours = step()
    assert not looked_at
    with checked_first():
        other = step(backend="cpp")
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))
