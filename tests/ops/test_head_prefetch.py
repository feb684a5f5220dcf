"""Batches of many short heads, for which the CPU kernels prefetch the next head."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, random_qkv, short

from fused_attn import functional, varlen_attention
from fused_attn.masks import padding


def with_gradients(function, query, key, value):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_batch_equals_its_sequences(dtype, masked):
    """A large batch, whose heads are prefetched, equals sequences too small for prefetching."""
    batch, heads, heads_kv = 24, 8, 4
    lengths = torch.arange(batch) % 5 * 20 + 40
    tensors = [x.to(dtype) for x in random_qkv(batch, heads, heads_kv, 90, 120, 32, 40).values()]
    sizes = [x.nbytes for x in tensors]
    assert sum(sizes) > 2**20, "large enough to be prefetched"
    assert sum(sizes) / batch < 2**20, "a sequence is not"

    def attention(rows):
        mask = padding(lengths[rows]) if masked else None
        return lambda *x: functional.scaled_dot_product_attention(
            *x, mask, enable_gqa=True, backend="cpp"
        )

    results = with_gradients(attention(slice(None)), *tensors)
    for b in range(batch):
        rows = slice(b, b + 1)
        alone = with_gradients(attention(rows), *(x[rows] for x in tensors))
        for whole, single in zip(results, alone, strict=True):
            assert torch.equal(whole[rows], single)


def test_packed_batch_equals_its_sequences():
    lengths = [7, 120, 33, 1, 90, 64, 128, 100] * 6
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [torch.randn(int(ends[-1]), 8, 32) for _ in range(3)]
    assert 4 * tensors[0].nbytes > 2**20, "large enough to be prefetched"
    results = with_gradients(
        lambda *x: varlen_attention(*x, ends, ends, 128, 128, backend="cpp"), *tensors
    )
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        where = torch.tensor([0, end - begin])
        alone = with_gradients(
            lambda *x, where=where: varlen_attention(*x, where, where, 128, 128, backend="cpp"),
            *(x[begin:end] for x in tensors),
        )
        for whole, single in zip(results, alone, strict=True):
            assert torch.equal(whole[begin:end], single)
