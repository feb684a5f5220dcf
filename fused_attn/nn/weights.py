"""Attention that also returns its weights, for modules called with need_weights=True."""

from __future__ import annotations

from torch import Tensor

from fused_attn.call.attention import AttentionOptions, UncheckedAttention
from fused_attn.masks import Mask
from fused_attn.ops import dispatch


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    seed: int | Tensor | None = None,
    average: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention and return the output and the attention weights.

    The fused kernel computes the output, and a second kernel recomputes the weights from lse. With
    `average`, the second kernel averages the weights before the store, so neither forward nor
    backward materializes a (batch, num_heads, seqlen_q, seqlen_k) tensor. Fully masked tiles are
    skipped. Both results are differentiable in query, key and a float mask, to any order.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16 or float64.
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask, dropout_p, is_causal, seed, backend: as in scaled_dot_product_attention.
        average: average the weights over the heads.

    Returns:
        A tuple of out, (batch, num_heads, seqlen_q, head_dim_v), and the weights after dropout, in
        the dtype of query. The weights have shape (batch, num_heads, seqlen_q, seqlen_k), or
        (batch, seqlen_q, seqlen_k) if averaged. Weights of masked keys are 0, so fully masked rows
        are 0.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value.
        NotImplementedError: the requested backend does not support the problem.

    Example:
        >>> out, weights = attention_with_weights(query, key, value, is_causal=True, average=True)
    """
    options = AttentionOptions(None, None, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, attn_mask, is_causal, True, options)
    return dispatch.attention_with_weights(call, average, backend)
