"""flash-attn's functions for batches of sequences of equal length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_attn import functional
from fused_attn.compat.flash_attn.arguments import (
    Window,
    check_dense,
    check_probs,
    common_of,
    mask_of,
)

Results = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    **keywords: Any,
) -> Results:
    """Compute attention with the arguments of flash_attn.flash_attn_func.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads may be a multiple of num_heads_kv.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        dropout_p: probability of dropping an attention weight.
        softmax_scale: factor of q @ k^T; None means 1 / sqrt(head_dim).
        causal: query i attends to keys j <= i + seqlen_k - seqlen_q.
        window_size: number of visible keys to the (left, right) of that position; -1 or None means
            unlimited.
        softcap: replace scores by softcap * tanh(scores / softcap); 0 disables it.
        alibi_slopes: float (num_heads,) or (batch, num_heads); see `masks.alibi`.
        deterministic: require a deterministic backward. On the CPU, it always is.
        return_attn_probs: also return lse and None.
        learnable_sink: (num_heads,), logits that are part of the softmax but have no value.
        keywords: num_splits, pack_gqa and sm_margin affect no result. Others must have their
            defaults.

    Returns:
        out, (batch, seqlen_q, num_heads, head_dim_v). With return_attn_probs, also lse, (batch,
        num_heads, seqlen_q), and None in place of the weights.

    Raises:
        NotImplementedError: an argument is not supported.
        ValueError, TypeError: an argument is invalid.
    """
    check_dense(q, k, v)
    check_probs(return_attn_probs, dropout_p)
    options = common_of(
        "flash_attn_func", q, softmax_scale, softcap, deterministic, learnable_sink, keywords
    )
    results = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask_of(causal, window_size, alibi_slopes),
        dropout_p,
        enable_gqa=True,
        return_lse=return_attn_probs,
        **options,
    )
    if isinstance(results, tuple):
        return results[0].transpose(1, 2), results[1], None
    return results.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **keywords: Any) -> Results:
    """Compute `flash_attn_func` for qkv, (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **keywords)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **keywords: Any) -> Results:
    """Compute `flash_attn_func` for kv, (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **keywords)
