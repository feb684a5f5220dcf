"""Conversion of attention inputs to the 4-D shapes that kernels require."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Hint for error messages, for inputs whose head and sequence dimensions look transposed.
TRANSPOSED = (
    "; query, key and value must be (batch, num_heads, seqlen, head_dim), and look like (batch, "
    "seqlen, num_heads, head_dim): pass their .transpose(1, 2)"
)


class Canonical(NamedTuple):
    """Attention inputs in 4-D form, and the leading dimensions of the results.

    Attributes:
        query, key, value: (batch, num_heads or num_heads_kv, seqlen, head_dim or head_dim_v).
        mask: the mask tensor, with at most 4 dimensions, or None.
        leading: shape of lse for the caller; the caller's out has shape (*leading, head_dim_v).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    leading: tuple[int, ...]


def canonical(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> Canonical:
    """Convert query, key, value and mask to 4-D tensors with equal batch and compatible heads.

    A head dimension is added to 2-D and 3-D inputs, and several batch dimensions are merged into
    one. 4-D inputs are not copied.

    Args:
        mask: mask tensor of the call, or None.
        enable_gqa: allow num_heads to be a multiple of num_heads_kv. Key and value are then not
            expanded.

    Raises:
        ValueError: the batch dimensions or the heads are incompatible.
    """
    ndim = max(query.dim(), key.dim(), value.dim())
    if (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
    ):
        return Canonical(query, key, value, mask, tuple(query.shape[:3]))  # the common case
    has_heads = ndim > 3
    tensors = []
    for tensor in (query, key, value):
        tensor = tensor[(None,) * (ndim - tensor.dim())] if tensor.dim() < ndim else tensor
        tensors.append(tensor if has_heads else tensor.unsqueeze(-3))
    batch = _batch(tensors)
    query, key, value = (_one_batch(t, batch) for t in tensors)
    query, key, value = _fit_heads(query, key, value, enable_gqa)
    if mask is not None and ndim != 4:
        mask = _mask(mask, batch, has_heads)
    leading = (*batch, query.shape[1], query.shape[2]) if has_heads else (*batch, query.shape[2])
    return Canonical(query, key, value, mask, leading)


def _batch(tensors: list[Tensor]) -> tuple[int, ...]:
    shapes = [t.shape[:-3] for t in tensors]
    if shapes[0] == shapes[1] == shapes[2]:
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        got = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"query, key and value must have batch dimensions that broadcast, got {got}"
        ) from None


def _one_batch(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    if tensor.shape[:-3] != batch:
        tensor = tensor.expand(*batch, *tensor.shape[-3:])
    return tensor if len(batch) == 1 else tensor.reshape(math.prod(batch), *tensor.shape[-3:])


def _fit_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads, heads_k, heads_v = query.shape[1], key.shape[1], value.shape[1]
    if heads == heads_k == heads_v:
        return query, key, value
    if enable_gqa:
        if heads_k != heads_v:
            raise ValueError(f"value must have num_heads_kv {heads_k} (like key), got {heads_v}")
        if heads_k == 0 or heads % heads_k:
            raise ValueError(
                f"num_heads_kv of key must divide num_heads of query, {heads}, "
                f"got {heads_k}{_layout_hint(query, key)}"
            )
        return query, key, value
    total = max(heads, heads_k, heads_v) if min(heads, heads_k, heads_v) else 0
    for name, have in (("query", heads), ("key", heads_k), ("value", heads_v)):
        if have not in (1, total):
            hint = _layout_hint(query, key)
            hint = hint or "; pass enable_gqa=True to share keys and values among heads"
            raise ValueError(f"{name} must have num_heads {total} or 1, got {have}{hint}")
    query = query.expand(-1, total, -1, -1)
    if heads_k != heads_v:
        key, value = key.expand(-1, total, -1, -1), value.expand(-1, total, -1, -1)
    return query, key, value


def _layout_hint(query: Tensor, key: Tensor) -> str:
    """Return TRANSPOSED if the heads of query and key would match after a transpose, else ""."""
    (heads, seqlen_q), (heads_kv, seqlen_k) = query.shape[1:3], key.shape[1:3]
    heads_fit = heads_kv and heads % heads_kv == 0
    if heads_fit or seqlen_k == 0 or seqlen_q % seqlen_k:
        return ""
    return TRANSPOSED


def _mask(mask: Tensor, batch: tuple[int, ...], has_heads: bool) -> Tensor:
    """Convert a mask tensor to at most 4 dimensions, for inputs that are not 4-D."""
    limit = len(batch) + (3 if has_heads else 2)
    if mask.dim() > limit:
        got = tuple(mask.shape)
        raise ValueError(f"attn_mask must have at most {limit} dimensions, got shape {got}")
    if not has_heads:
        return mask.unsqueeze(-3) if mask.dim() > 2 else mask
    own = mask.shape[:-3]
    if mask.dim() <= 3 or math.prod(own) == 1:
        return mask.reshape(mask.shape[-3:])
    try:
        mask = mask.expand(*batch, *mask.shape[-3:])
    except RuntimeError:
        got = tuple(mask.shape)
        raise ValueError(
            f"attn_mask must have batch dimensions that broadcast to {batch}, got shape {got}"
        ) from None
    return mask.reshape(math.prod(batch), *mask.shape[-3:])
