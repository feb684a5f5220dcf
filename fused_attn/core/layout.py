"""How the tensors of attention lie in memory."""

from __future__ import annotations

from torch import Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


def out_layout(query: Tensor, value: Tensor) -> Layout:
    """An output laid out as (batch, seqlen_q, num_heads, head_dim_v), which the projection that
    follows reads without a copy."""
    batch, num_heads, seqlen_q, _ = query.shape
    return _heads_inside(batch, num_heads, seqlen_q, value.shape[-1])


def gradient_layout(tensor: Tensor) -> Layout:
    """A gradient laid out as (batch, seqlen, num_heads, head_dim), as projections want it."""
    batch, num_heads, seqlen, head_dim = tensor.shape
    return _heads_inside(batch, num_heads, seqlen, head_dim)


def _heads_inside(batch: int, num_heads: int, seqlen: int, dim: int) -> Layout:
    """Strides for a fresh tensor, not a transpose of one: that would be a view to autograd, which
    restricts in-place operations on it."""
    strides = (seqlen * num_heads * dim, dim, num_heads * dim, 1)
    return (batch, num_heads, seqlen, dim), strides


def readable_in_place(tensor: Tensor) -> Tensor:
    """Kernels read any strides whose last one is 1, and no lazy negation; others are copied."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return (tensor if dense else tensor.contiguous()).resolve_neg()
