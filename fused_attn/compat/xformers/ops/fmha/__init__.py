"""Attention functions and masks with the names of xformers.ops.fmha."""

from fused_attn.compat.xformers.ops.fmha import attn_bias
from fused_attn.compat.xformers.ops.fmha.attention import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from fused_attn.compat.xformers.ops.fmha.attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMask,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
