"""Training and packed calls of plain tensors take a short way on CPUs, with the same results."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, short

from fused_attn import functional as F
from fused_attn import masks, nn, varlen, varlen_attention
from fused_attn.ops import autograd

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


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def at_once(monkeypatch):
    """The results that came by the short way."""
    results = []

    def spy(*args, _function=autograd.attention_at_once):
        results.append(_function(*args))
        return results[-1]

    monkeypatch.setattr(autograd, "attention_at_once", spy)
    return results


def tensors(dtype, heads_kv=4, layout="bhld"):
    shapes = ((2, 4, 23, 16), (2, heads_kv, 19, 16), (2, heads_kv, 19, 24))
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if layout == "blhd":
        made = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return [t.requires_grad_() for t in made]


def trained(leaves, **options):
    torch.manual_seed(7)
    out = F.scaled_dot_product_attention(*leaves, **options)
    torch.manual_seed(8)
    return out, *torch.autograd.grad(out, leaves, torch.randn_like(out))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("mask", MASKS)
def test_training_is_that_of_the_whole_way(mask, dropout_p, dtype, at_once):
    options = MASKS[mask]() | {"dropout_p": dropout_p}
    for heads_kv in (4, 2):
        for layout in ("bhld", "blhd"):
            leaves = tensors(dtype, heads_kv, layout)
            gqa = {"enable_gqa": heads_kv == 2}
            ours = trained(leaves, **options, **gqa)
            assert at_once and at_once.pop() is ours[0]
            whole = trained(leaves, **options, **gqa, backend="cpp")
            assert not at_once
            for ours_i, whole_i in zip(ours, whole, strict=True):
                assert torch.equal(ours_i, whole_i)
                assert ours_i.stride() == whole_i.stride()


@pytest.mark.parametrize("scale", [None, 0.3, 2])
def test_scale(scale, at_once):
    leaves = tensors(torch.float64)
    for ours, whole in zip(
        trained(leaves, scale=scale), trained(leaves, scale=scale, backend="cpp"), strict=True
    ):
        assert torch.equal(ours, whole)
    assert at_once


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
def test_gradients_of_any_layout(given, at_once):
    leaves = tensors(torch.float64)
    results = []
    for backend in (None, "cpp"):
        out = F.scaled_dot_product_attention(*leaves, backend=backend)
        results.append(torch.autograd.grad(given(out), leaves))
    assert at_once
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.sampled("dropout is there", dropout_p=[0.0])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_second_order_and_batches(dropout_p, at_once):
    leaves = [t[:1, :2, :5].detach().requires_grad_() for t in tensors(torch.float64)]

    def attend(*qkv):
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(*qkv, is_causal=True, dropout_p=dropout_p)

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)
    assert at_once and all(result is not None for result in at_once)
    jacobians = [
        torch.autograd.functional.jacobian(attend, tuple(leaves), vectorize=v) for v in (0, 1)
    ]
    torch.testing.assert_close(*jacobians)


def test_some_gradients_and_retained_graphs(at_once):
    query, key, value = tensors(torch.float32)
    query.requires_grad_(False)
    out = F.scaled_dot_product_attention(query, key, value)
    first = torch.autograd.grad(out.sum(), (key, value), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (key, value))
    assert at_once and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    tied = key.detach().requires_grad_()
    ours = F.scaled_dot_product_attention(tied, tied, tied)
    whole = F.scaled_dot_product_attention(tied, tied, tied, backend="cpp")
    grads = [torch.autograd.grad(o.sum(), tied)[0] for o in (ours, whole)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("changed", ["query", "mask"])
def test_changes_before_the_backward_are_errors(changed, at_once):
    query, key, value = tensors(torch.float32)
    mask = torch.rand(2, 1, 23, 19) < 0.6
    inner = query * 1
    out = F.scaled_dot_product_attention(inner, key, value, mask)
    assert at_once
    with torch.no_grad():
        (inner if changed == "query" else mask).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=short)
@pytest.mark.parametrize("backend", [None, "cpp"])
def test_saved_tensors_of_other_types(backend, dtype, which, at_once):
    """Hooks may give them back: they are converted, never read as what they are not."""
    leaves, unpacked = tensors(torch.bfloat16), []

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor.to(dtype) if len(unpacked) - 1 == which else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = F.scaled_dot_product_attention(*leaves, backend=backend)
    assert bool(at_once) == (backend is None)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert len(unpacked) > which
    want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sum(), leaves)
    for got, wanted in zip(grads, want, strict=True):
        torch.testing.assert_close(got.bfloat16(), wanted, rtol=0.1, atol=0.1)


def test_checkpoints_draw_the_same(at_once):
    leaves = tensors(torch.float32)

    def attend(*qkv):
        return F.scaled_dot_product_attention(*qkv, dropout_p=0.4)

    results = []
    for run in (attend, lambda *t: torch.utils.checkpoint.checkpoint(attend, *t, use_reentrant=0)):
        torch.manual_seed(2)
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert at_once
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_goes_the_whole_way(at_once):
    query, key, value = tensors(torch.float32)
    bias = torch.randn(23, 19, requires_grad=True)
    F.scaled_dot_product_attention(query, key, value, bias).sum().backward()
    assert bias.grad is not None
    F.scaled_dot_product_attention(query[0], key[0], value[0]).sum().backward()
    wide = torch.randn(1, 1, 3, 300, requires_grad=True)
    F.scaled_dot_product_attention(wide, wide, wide).sum().backward()
    assert at_once and all(result is None for result in at_once)
    F.scaled_dot_product_attention(query, key, value, dropout_p=1.0).sum().backward()


# ---- packed sequences ---------------------------------------------------------------------------

CU_SEQLENS = torch.tensor([0, 9, 9, 30, 47], dtype=torch.int32)


def packed(dtype, heads_kv=4, width=16):
    total = int(CU_SEQLENS[-1])
    return [torch.randn(total, h, width).to(dtype) for h in (4, heads_kv, heads_kv)]


@pytest.fixture
def packed_results(monkeypatch):
    """The results of packed calls that came by the short way."""
    results = []

    def spy(*args, _function=varlen._at_once):
        results.append(_function(*args))
        return results[-1]

    monkeypatch.setattr(varlen, "_at_once", spy)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("int_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "alibi"])
def test_packed(mask, int_type, dtype, packed_results):
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "window": {"attn_mask": masks.sliding_window(3, 2)},
        "alibi": {"attn_mask": masks.alibi(torch.rand(4)), "is_causal": True},
    }[mask]
    ends = CU_SEQLENS.to(int_type)
    for heads_kv in (4, 2):
        qkv = packed(dtype, heads_kv)
        for _ in range(2):  # the second finds what the first kept
            ours = varlen_attention(*qkv, ends, ends, 21, 30, **options)
            assert packed_results.pop() is ours
        whole = varlen_attention(*qkv, ends, ends, 21, 30, **options, backend="cpp")
        # bfloat16 without an lse, which the whole way always makes, may round otherwise.
        rounding = 2.0**-7 if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(ours, whole, rtol=rounding, atol=rounding)
        assert ours.stride() == whole.stride()
        sliced = [torch.cat([t, t], 2)[..., :16] for t in qkv]
        assert torch.equal(varlen_attention(*sliced, ends, ends, 21, 30, **options), ours)


def test_packed_lengths_are_checked(packed_results):
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
    ends[2] = 12  # in place: nothing that was kept holds any more
    ours = varlen_attention(query, key, value, ends, ends, 21, 21)
    whole = varlen_attention(query, key, value, ends.clone(), ends.clone(), 21, 21, backend="cpp")
    assert torch.equal(ours, whole)
    assert all(result is not None for result in packed_results[::4])


def test_packed_training_goes_the_whole_way(packed_results):
    query, key, value = (t.requires_grad_() for t in packed(torch.float32))
    out = varlen_attention(query, key, value, CU_SEQLENS, CU_SEQLENS, 21, 21)
    assert packed_results == [None]
    assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()


def test_packed_memory_is_not_kept(packed_results):
    """What is kept with cu_seqlens goes with it."""
    import gc
    import weakref

    query, key, value = packed(torch.float32)
    ends = CU_SEQLENS.to(torch.int64)
    reference = weakref.ref(ends)
    varlen_attention(query, key, value, ends, ends, 21, 21)
    del ends
    gc.collect()
    assert reference() is None


def test_encoder_of_padded_batches(packed_results):
    """Layers on packed tokens take the short way in inference."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    ignored = torch.arange(12) >= torch.tensor([12, 5, 3])[:, None]
    with torch.no_grad():
        encoder(torch.randn(3, 12, 16), src_key_padding_mask=ignored)
    assert len(packed_results) == 2 and all(result is not None for result in packed_results)
