"""Registration of timm's LayerNorm for `swap_modules`.

`fused_attn.enable()` covers timm's attention. All attention modules of timm call
torch.nn.functional.scaled_dot_product_attention, but Swin does so only after
timm.layers.set_fused_attn(True, experimental=True).
"""

from __future__ import annotations

from timm.layers import LayerNorm

from fused_attn import nn
from fused_attn.nn._from_torch import REPLACEMENTS


def register() -> None:
    """Register the replacement of timm.layers.LayerNorm; safe to call repeatedly.

    timm's class computes the same as torch.nn.LayerNorm. It only has a different constructor and a
    flag for faster kernels under autocast. LayerNorm2d and other norms of timm compute something
    else and are not replaced.
    """
    REPLACEMENTS[LayerNorm] = nn.LayerNorm
