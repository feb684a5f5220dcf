"""xFormers' memory-efficient attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn import functional, masks
from fused_attn.base.torch_state import needs_grad
from fused_attn.compat.xformers.ops.fmha import attn_bias as biases
from fused_attn.functional import varlen_attention
from fused_attn.masks import Mask

Bias = Tensor | biases.AttentionBias | None


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute attention with the arguments of xformers.ops.memory_efficient_attention.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim), (batch, seqlen_q, head_dim), or (batch,
            seqlen_q, groups, heads_per_group, head_dim).
        key: as query, with seqlen_k. The number of heads may be a divisor of num_heads, and
            heads_per_group may be 1. Heads that `expand` repeats are read once without gradients.
        value: as key, with head_dim_v.
        attn_bias: a mask of `fmha.attn_bias`, or a float tensor that is added to the scores,
            broadcastable to (batch, num_heads, seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k), or
            (batch, groups, heads_per_group, seqlen_q, seqlen_k), depending on query.
        p: probability of dropping an attention weight.
        scale: factor of query @ key^T; None means 1 / sqrt(head_dim).
        op: must be None; `fused_attn.use_backend` selects a backend.
        output_dtype: dtype of the result, which must be that of query; None means the same.

    Returns:
        out, with the shape of query and head_dim_v.

    Raises:
        NotImplementedError: an argument is not supported.
        ValueError, TypeError: an argument is invalid.
    """
    options: Any = {"op": op, "output_dtype": output_dtype}
    return _attention(query, key, value, attn_bias, p, scale, **options)[0]


def memory_efficient_attention_forward(*args: Any, **keywords: Any) -> Tensor:
    """Compute `memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(*args, **keywords)


def memory_efficient_attention_forward_requires_grad(
    *args: Any, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Compute `memory_efficient_attention` without gradients, and return out and lse.

    lse has shape (batch, num_heads, seqlen_q), or (batch, groups, heads_per_group, seqlen_q).
    """
    with torch.no_grad():
        return _attention(*args, **keywords, return_lse=True)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Any]:
    if op is not None:
        raise NotImplementedError(
            f"op must be None, got {op}: select a backend with fused_attn.use_backend"
        )
    if output_dtype not in (None, query.dtype):
        expected = f"{query.dtype} (like query)"
        raise NotImplementedError(f"output_dtype must be {expected}, got {output_dtype}")
    q, k, v = _four_dims(query, key, value)
    options: dict[str, Any] = {"scale": scale, "return_lse": return_lse}
    if not isinstance(attn_bias, biases.Blocks):
        out, lse = _padded(q, k, v, _mask_of(attn_bias, query), p, options)
    else:
        out, lse = _packed(q, k, v, attn_bias, p, options)
    groups = query.shape[2:-1]
    if lse is not None and len(groups) == 2:
        lse = lse.unflatten(1, groups)
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse


def _four_dims(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return query, key and value with shape (batch, seqlen, num_heads, head_dim).

    Heads that `expand` repeats are removed if key and value need no gradients.
    """
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if query.dim() not in (3, 4, 5) or not query.dim() == key.dim() == value.dim():
        raise ValueError(f"query, key and value must all have 3, 4 or 5 dimensions, got {shapes}")
    if query.dim() == 3:
        return [x[:, :, None] for x in (query, key, value)]
    heads = query.shape[3] if query.dim() == 5 else 0
    if heads and any(s[2] != shapes[0][2] or s[3] not in (1, heads) for s in shapes):
        raise ValueError(
            "key and value must have the same number of groups as query, and 1 head or the number "
            f"of heads of query, got shapes {shapes}"
        )
    shared = not needs_grad(key, value)
    if all(x.shape[-2] == 1 or (shared and x.stride(-2) == 0) for x in (key, value)):
        key, value = (x.narrow(-2, 0, 1) for x in (key, value))
    elif heads:
        key, value = (x.expand(-1, -1, -1, heads, -1) for x in (key, value))
    return [x.flatten(2, 3) if heads else x for x in (query, key, value)]


def _mask_of(attn_bias: Bias, query: Tensor) -> Tensor | Mask | None:
    """Return the attn_mask of scaled_dot_product_attention for a mask or tensor of xFormers."""
    if attn_bias is None:
        return None
    if not isinstance(attn_bias, Tensor):
        _check_kind(attn_bias)
    bias = getattr(attn_bias, "bias", attn_bias)
    if isinstance(bias, Tensor):
        if not bias.is_floating_point() or bias.dim() != query.dim():
            expected = f"a float tensor with {query.dim()} dimensions (like query)"
            got = f"{bias.dtype} of shape {tuple(bias.shape)}"
            raise ValueError(f"attn_bias must be {expected}, got {got}")
        if query.dim() == 3:
            bias = bias[:, None]
        elif query.dim() == 5:
            same = bias.shape[1:3] == (1, 1)
            bias = (bias if same else bias.expand(-1, *query.shape[2:4], -1, -1)).flatten(1, 2)
        if isinstance(attn_bias, Tensor):
            return bias
        return masks.causal() & masks.bias(bias)
    return attn_bias.mask  # type: ignore[union-attr]


def _check_kind(attn_bias: Any) -> None:
    """Raise NotImplementedError for classes other than the masks of fmha.attn_bias."""
    kind = type(attn_bias)
    if getattr(biases, kind.__name__, None) is not kind or "Mask" not in kind.__name__:
        raise NotImplementedError(
            f"attn_bias must be a float tensor or a mask of {biases.__name__}, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None,
    p: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    results = functional.scaled_dot_product_attention(q, k, v, mask, p, enable_gqa=True, **options)
    out, lse = results if isinstance(results, tuple) else (results, None)
    return out.transpose(1, 2), lse


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: biases.Blocks,
    p: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Return out and lse, (1, num_heads, total_q), of sequences concatenated in one dimension."""
    _check_kind(blocks)
    if not len(query) == len(key) == len(value) == 1:
        got = f"{len(query)}, {len(key)}, {len(value)}"
        raise ValueError(f"query, key and value must have batch size 1, got {got}")
    blocks.check_rows(query.shape[1], key.shape[1])
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"value must have the {key.shape[1]} rows of key, got {value.shape[1]}")
    queries, keys = blocks.q_seqinfo, blocks.k_seqinfo
    longest, batch = queries.max_seqlen, len(queries.seqlen_py)
    if keys.padding and 0 < longest == queries.min_seqlen:
        q = query.unflatten(1, (batch, longest))[0]
        k, v = (x.unflatten(1, (batch, keys.padding))[0] for x in (key, value))
        out, lse = _padded(q, k, v, blocks.padded_mask, p, options)
        lse = None if lse is None else lse.transpose(0, 1).flatten(1)[None]
        return out.flatten(0, 1)[None], lse
    k, v, ends = key[0], value[0], keys.seqstart
    if keys.padding != 0:
        rows, ends = blocks.key_rows(key.shape[1])
        k, v = k[rows], v[rows]
    lengths = queries.seqstart, ends, longest, keys.max_seqlen
    results = varlen_attention(query[0], k, v, *lengths, blocks.mask, p, **options)
    out, lse = results if isinstance(results, tuple) else (results, None)
    return out[None], None if lse is None else lse[None]
