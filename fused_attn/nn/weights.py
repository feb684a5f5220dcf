"""Attention together with its weights, for modules whose callers ask for them."""

from __future__ import annotations

from torch import Tensor

from fused_attn import functional, masks
from fused_attn.backends import reference
from fused_attn.core import autograd, ops, philox
from fused_attn.core.validation import checked_probability, checked_scale
from fused_attn.masks import Mask
from fused_attn.masks.spec import normalize


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    average: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention`, and the weights that it multiplied the values with.

    out comes from the fused kernel; a second one computes the weights anew from its lse. Where
    they are averaged, it does so before it writes them, so that no (batch, num_heads, seqlen_q,
    seqlen_k) tensor is held, in the backward neither. Tiles that the mask hides are not computed.
    Both are differentiable in query, key and a float mask, to any order.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16, float64.
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask, dropout_p, is_causal, backend: as in scaled_dot_product_attention.
        average: average the weights over the heads.

    Returns:
        out, (batch, num_heads, seqlen_q, head_dim_v), and the weights after dropout, (batch,
        num_heads, seqlen_q, seqlen_k), or (batch, seqlen_q, seqlen_k) for the average, in the type
        of query. What is hidden is 0, and so are rows that see nothing.

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.
        NotImplementedError: the backend that was asked for does not take the problem.

    Example:
        >>> out, weights = attention_with_weights(query, key, value, is_causal=True, average=True)
    """
    query, key, value = ops.autocast(query, key, value)
    dropout_p = checked_probability(dropout_p)
    batch, num_heads, seqlen_q, head_dim = query.shape
    mask = masks.as_mask(attn_mask, is_causal)
    spec = normalize(mask, batch, num_heads, seqlen_q, key.shape[2], query)
    name = functional._select_attention(query, value, spec, backend)
    seed = philox.new_seed(query.device) if dropout_p > 0.0 else None
    options = (spec, checked_scale(None, head_dim), 0.0, dropout_p, seed)
    if name == "eager":
        out, _ = reference.attention(query, key, value, *options)
        return out, reference.attention_weights(query, key, *options, average)
    return autograd.attention_with_weights(query, key, value, *options, average, name)
