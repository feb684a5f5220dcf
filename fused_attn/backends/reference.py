"""The reference: attention and norms in plain torch operations, differentiable to any order.

It is the truth of the tests (in float64), what `compare` and the benchmarks call eager, what
second-order gradients are computed with, and the backend "eager" that takes every problem.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_attn.core import packed, philox
from fused_attn.core.torch_state import statistics_dtype
from fused_attn.masks import spec as mask_spec
from fused_attn.masks.spec import MaskSpec


def unavailable() -> list[str]:
    """Why this backend cannot run on this machine: it always can."""
    return []


def unsupported(problem: object) -> list[str]:
    """Why this backend does not take a problem: it takes all."""
    return []


def not_automatic() -> list[str]:
    """Why this backend is chosen only where it is asked for by name: it is chosen unasked."""
    return []


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) with the score matrix.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        spec: the mask; with packed sequences there is one batch, and the shapes below are those
            of query.
        scale: multiplies query @ key^T.
        softcap: 0 for none, else the scores become softcap * tanh(scores / softcap).
        dropout_p: probability of dropping a weight.
        seed: int64 scalar tensor, needed where dropout_p > 0.

    Returns:
        out (batch, num_heads, seqlen_q, head_dim_v) in the type of query, and lse (batch,
        num_heads, seqlen_q) in float32 (float64 for float64).
    """
    if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
        cu_seqlens_q, total_q = spec.cu_seqlens_q, query.shape[2]
        query = packed.pad(query, cu_seqlens_q, spec.max_seqlen_q)
        key, value = (packed.pad(t, spec.cu_seqlens_k, spec.max_seqlen_k) for t in (key, value))
        spec = replace(spec, cu_seqlens_q=None, cu_seqlens_k=None)
        padded = attention(query, key, value, spec, scale, softcap, dropout_p, seed)
        out, lse = (packed.unpad(t, cu_seqlens_q, total_q) for t in padded)
        return out, lse
    weights, value, empty, lse = _weights(query, key, value, spec, scale, softcap, dropout_p, seed)
    # Where a row sees nothing, its gradient does not matter either, NaN included.
    return (weights.to(value.dtype) @ value).masked_fill(empty, 0.0), lse


def attention_weights(
    query: Tensor,
    key: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    average: bool,
) -> Tensor:
    """What `attention` multiplies values with: its weights after dropout.

    Args:
        average: over the heads.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k), without num_heads for the average, in the type of
        query; 0 where a row sees nothing.
    """
    weights, _, empty, _ = _weights(query, key, key, spec, scale, softcap, dropout_p, seed)
    weights = weights.to(query.dtype).masked_fill(empty, 0.0)
    return weights.mean(dim=1) if average else weights


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights after dropout, value with one head for each of query's, empty rows, and lse."""
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_k, group = key.shape[2], num_heads // max(key.shape[1], 1)
    scores, value = _scores(query, key, value, spec, scale, softcap, group)
    statistics = statistics_dtype(scores.dtype)
    lowest = scores.new_full((*scores.shape[:3], 1), float("-inf"))  # amax needs an element
    maximum = scores.detach().amax(-1, keepdim=True) if seqlen_k else lowest
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True, dtype=statistics)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    lse = (maximum.to(statistics) + total.log()).masked_fill(empty, float("-inf")).squeeze(-1)
    weights = weights / total.to(weights.dtype)
    if dropout_p > 0.0:
        assert seed is not None
        keep = philox.attention_keep(seed, dropout_p, batch, num_heads, seqlen_q, seqlen_k)
        weights = weights * (keep.to(weights.dtype) * philox.dropout_scale(dropout_p))
    return weights, value, empty, lse


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    group: int,
) -> tuple[Tensor, Tensor]:
    """Masked scores, and value with one head for each of query's."""
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    visible, bias = mask_spec.materialize(
        spec, batch, num_heads, seqlen_q, seqlen_k, query.device, statistics_dtype(query.dtype)
    )
    key, value = (t.repeat_interleave(group, 1) if group > 1 else t for t in (key, value))
    if visible is not None:
        # 0 * NaN is NaN: keys, values and queries without a partner are taken out.
        unseen = ~visible.any(2)[..., None]
        key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
        query = query.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    scores = (query * scale) @ key.transpose(-2, -1)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores, value


def norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """norm(residual + dropout(input)) over the last dimension, and that sum.

    Args:
        input, residual: (rows, columns).
        weight, bias: (columns,).
        rms: RMS norm (Zhang and Sennrich 2019) instead of layer norm (Ba et al. 2016).
    """
    total = input
    if dropout_p > 0.0:
        assert seed is not None
        keep = philox.norm_keep(seed, dropout_p, *input.shape)
        total = total * (keep.to(input.dtype) * philox.dropout_scale(dropout_p))
    if residual is not None:
        total = residual + total
    shape = total.shape[-1:]
    if not rms:
        if weight is not None:
            weight = weight.to(total.dtype)
        if bias is not None:
            bias = bias.to(total.dtype)
        return torch.nn.functional.layer_norm(total, shape, weight, bias, eps), total
    out = torch.nn.functional.rms_norm(total, shape, None, eps)
    return (out if weight is None else (out * weight).to(total.dtype)), total
