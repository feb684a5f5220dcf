"""Backend "sdpa": values cached between calls, packed sequences and KV caches."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from small_calls import assert_close_to_eager, by, qkv

import fused_attn as fa
from fused_attn import masks
from fused_attn.backends import sdpa
from fused_attn.masks import torch_arguments


def test_a_tensor_under_several_masks():
    """Values cached for one mask are not reused for another mask that contains the same tensor."""
    q, k, v = qkv(grad=False)
    bias, visible = torch.randn(4, 33, 47), torch.rand(2, 1, 33, 47) > 0.3
    for tensor in (bias, visible):
        for is_causal in (False, True, False):
            for window in (None, masks.sliding_window(5)):
                mask = masks.as_mask(tensor, is_causal)
                mask = mask if window is None else mask & window
                assert_close_to_eager(lambda m=mask: fa.scaled_dot_product_attention(q, k, v, m))


def test_changes_of_a_cached_mask_are_detected():
    q, k, v = qkv(grad=False)
    visible = torch.ones(33, 47, dtype=torch.bool)

    def call():
        return fa.scaled_dot_product_attention(q, k, v, visible)

    by("sdpa", call)
    visible[:, 5:] = False
    visible[3] = False
    assert_close_to_eager(call)


def test_masks_that_torch_accepts_are_freed():
    mask = torch.ones(1, 1, 33, 47, dtype=torch.bool)
    with fa.use_backend("sdpa"):
        fa.scaled_dot_product_attention(*qkv(grad=False), mask)
    ref = weakref.ref(mask)
    del mask
    gc.collect()
    assert ref() is None


def test_few_slices_of_a_mask_are_cached(monkeypatch):
    """At most 10 masks that were derived from slices of a mask stay in memory."""
    monkeypatch.setattr(torch_arguments, "host_readable", lambda tensor: False)
    cached = weakref.WeakSet()
    bool_or = torch.Tensor.__or__

    def counted(self, other):
        result = bool_or(self, other)
        cached.add(result)
        return result

    monkeypatch.setattr(torch.Tensor, "__or__", counted)
    visible = torch.rand(1, 1, 40, 40) > 0.2
    q = torch.randn(1, 2, 40, 8)
    with fa.use_backend("sdpa"):
        for n in range(2, 40):
            x = q[:, :, :n]
            fa.scaled_dot_product_attention(x, x, x, visible[:, :, :n, :n])
    gc.collect()
    assert len(cached) <= 10


def test_packed():
    q, k, v = (torch.randn(30, 4, 16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 11, 11, 30])

    def call():
        out = fa.varlen_attention(q, k, v, ends, ends, 19, 19, is_causal=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    assert_close_to_eager(call)


@pytest.mark.parametrize("lengths", [[9, 9], [9, 3], [0, 0]])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
@pytest.mark.parametrize("pages", [False, True])
def test_decode_reads_caches_in_place(lengths, seqlen_q, pages, monkeypatch):
    """Unpaged caches with equal lengths are read in place; all other caches are copied."""
    attend = mock.Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(sdpa, "torch_sdpa", attend)
    q, new = torch.randn(2, 4, seqlen_q, 16), torch.randn(2, 2, 4, seqlen_q, 16).unbind()
    caches = [torch.full((2, 4, 32, 16), float("nan")) for _ in range(2)]
    for cache in caches:
        for rows, length in zip(cache, lengths, strict=True):
            rows[:, :length] = torch.randn(4, length, 16)
    table = torch.tensor([[0], [1]]) if pages else None

    def call(*caches, cache_lengths):
        return fa.decode_attention(
            q, *caches, cache_lengths=cache_lengths, key=new[0], value=new[1], block_table=table
        )

    expected = by("cpp", lambda: call(*[c.clone() for c in caches], cache_lengths=lengths))
    for given in (lengths, torch.tensor(lengths)):
        got = by("sdpa", lambda given=given: call(*caches, cache_lengths=given))
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
        for tensor, cache in zip(attend.call_args_list.pop().args[1:3], caches, strict=True):
            assert tensor.shape[2] == max(lengths) + seqlen_q
            in_place = tensor.data_ptr() == cache.data_ptr()
            assert in_place is (lengths[0] == lengths[1] and not pages)


@pytest.fixture
def materialize(monkeypatch):
    """Return a mock of the function that materializes masks, which counts its calls."""
    function = mock.Mock(wraps=torch_arguments.materialize)
    monkeypatch.setattr(torch_arguments, "materialize", function)
    return function


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("argument", [False, True])
def test_layers_share_materialized_masks(materialize, is_causal, argument):
    """Layers share one materialized mask, whether use_backend or an argument names the backend."""
    q, k, v = qkv(grad=False)
    lengths = torch.tensor([47, 20])
    mask = masks.padding(lengths)

    def call(backend=None):
        return fa.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, backend=backend)

    for _ in range(2):
        materialize.reset_mock()
        for _ in range(3):
            out = call("sdpa") if argument else by("sdpa", call)
        assert materialize.call_count == 1
        torch.testing.assert_close(out, call(backend="eager"), rtol=0, atol=2e-6)
        lengths[1] = 11


def test_packed_layers_share_materialized_masks(materialize):
    """Layers with the same cu_seqlens share one materialized mask until cu_seqlens changes."""
    q, k, v = (torch.randn(30, 4, 16) for _ in range(3))
    ends = torch.tensor([0, 11, 11, 30], dtype=torch.int32)
    cases = [{}, {"is_causal": True}, {"attn_mask": masks.sliding_window(3)}]
    for middle in (11, 13):
        ends[1] = ends[2] = middle
        for options in cases:
            materialize.reset_mock()
            for _ in range(3):
                out = fa.varlen_attention(q, k, v, ends, ends, 19, 19, backend="sdpa", **options)
            assert materialize.call_count == 1
            expected = fa.varlen_attention(
                q, k, v, ends.clone(), ends.clone(), 19, 19, backend="eager", **options
            )
            torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    ends[1] = 31
    with pytest.raises(ValueError, match="cu_seqlens_q must have differences"):
        fa.varlen_attention(q, k, v, ends, ends, 19, 19)


def test_cached_values_do_not_keep_cu_seqlens_alive():
    q, k, v = (torch.randn(30, 4, 16) for _ in range(3))
    ends = torch.tensor([0, 11, 30])
    fa.varlen_attention(q, k, v, ends, ends, 19, 19, is_causal=True, backend="sdpa")
    seen = weakref.ref(ends)
    del ends
    gc.collect()
    assert seen() is None
