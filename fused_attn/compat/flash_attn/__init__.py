"""flash-attn's functions on the kernels of this package, including those for CPUs.

Names, positional arguments and layouts are those of flash-attn 2; the keywords that flash-attn 3
and 4 add are accepted. Tensors have shape (batch, seqlen, num_heads, head_dim), or (total,
num_heads, head_dim) if packed. Causal masks and windows are aligned at the bottom right. An
argument that this package does not support raises NotImplementedError. Differences:

- dtypes and head_dim are those of `scaled_dot_product_attention`, including float32.
- Dropout drops different weights for the same generator.
- lse is -inf in rows without visible keys, as in flash-attn 3 (flash-attn 2: inf).

Example:
    >>> import fused_attn.compat.flash_attn as flash_attn
    >>> q, k, v = (torch.randn(2, 100, 8, 64) for _ in range(3))
    >>> flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(16, 0)).shape
    torch.Size([2, 100, 8, 64])

Source: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3".
"""

from fused_attn.compat.flash_attn import bert_padding
from fused_attn.compat.flash_attn.cache import flash_attn_with_kvcache
from fused_attn.compat.flash_attn.dense import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from fused_attn.compat.flash_attn.packed import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
