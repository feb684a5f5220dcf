"""timm's LayerNorm subclass, for `swap_modules`; `fused_attn.enable()` covers timm's attention.

All attention modules of timm call torch.nn.functional.scaled_dot_product_attention, Swin only after
timm.layers.set_fused_attn(True, experimental=True).
"""

from __future__ import annotations

from timm.layers import LayerNorm

from fused_attn import nn
from fused_attn.nn._from_torch import REPLACEMENTS


def register() -> None:
    """Register the replacement of exactly timm.layers.LayerNorm; safe to call repeatedly.

    That class computes the same as torch.nn.LayerNorm; it only adds a different constructor and a
    flag for faster kernels under autocast. LayerNorm2d and others compute something else and are
    not replaced.
    """
    REPLACEMENTS[LayerNorm] = nn.LayerNorm
