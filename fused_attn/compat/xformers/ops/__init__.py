"""Attention functions and masks with the names and arguments of xformers.ops.

Tensors have shape (batch, seqlen, num_heads, head_dim), (batch, seqlen, head_dim), or (batch,
seqlen, groups, heads_per_group, head_dim). Masks are in `fmha.attn_bias`. Kernels read them as
structure, never as a dense tensor. An argument that this package does not support raises
NotImplementedError. Differences:

- dtypes and head_dim are those of `scaled_dot_product_attention`.
- Gradients are supported for all layouts and masks.
- Dropout drops different weights for the same generator.
- Rows without visible keys are 0, and lse is -inf there.
- Keys and values may have fewer heads than query, without `expand`.
- Keys that are stored with gaps or in pages are copied, except those of a
  `BlockDiagonalPaddedKeysMask` with an equal number of queries in each sequence.

Example:
    >>> import fused_attn.compat.xformers.ops as xops
    >>> lists = [torch.randn(1, length, 3, 8, 64) for length in (100, 28, 64)]
    >>> bias, qkv = xops.fmha.attn_bias.BlockDiagonalMask.from_tensor_list(lists)
    >>> out = xops.memory_efficient_attention(*qkv.unbind(2), attn_bias=bias.make_causal())
    >>> [tuple(x.shape) for x in bias.split(out)]
    [(1, 100, 8, 64), (1, 28, 8, 64), (1, 64, 8, 64)]

Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory".
"""

from fused_attn.compat.xformers.ops import fmha
from fused_attn.compat.xformers.ops.fmha import (
    AttentionBias,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

AttentionMask = AttentionBias

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "LowerTriangularMask",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
