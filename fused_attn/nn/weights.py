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
    """Compute attention and return out and the attention weights after dropout.

    A second kernel recomputes the weights from lse, so they are differentiable in query, key and a
    float mask, to any order. Weights of masked keys are 0, also in fully masked rows.

    Args:
        average: average the weights over the heads before they are stored, so that neither forward
            nor backward materializes a (batch, num_heads, seqlen_q, seqlen_k) tensor.

    Other arguments are those of `scaled_dot_product_attention`, with enable_gqa=True.
    """
    options = AttentionOptions(None, None, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, attn_mask, is_causal, True, options)
    return dispatch.attention_with_weights(call, average, backend)
