"""How outputs and gradients of attention lie in memory."""

from __future__ import annotations

from torch import Tensor


def new_out(query: Tensor, value: Tensor) -> Tensor:
    """An output laid out as (batch, seqlen_q, num_heads, head_dim_v), which the projection that
    follows reads without a copy."""
    batch, num_heads, seqlen_q, _ = query.shape
    return query.new_empty(batch, seqlen_q, num_heads, value.shape[-1]).transpose(1, 2)


def new_gradient(tensor: Tensor) -> Tensor:
    """A gradient laid out as (batch, seqlen, num_heads, head_dim), as projections want it."""
    batch, num_heads, seqlen, head_dim = tensor.shape
    return tensor.new_empty(batch, seqlen, num_heads, head_dim).transpose(1, 2)
