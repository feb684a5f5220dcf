"""timm's own layer norm, for `swap_modules`; its attention is `fused_attn.enable()`'s business.

Every attention of timm calls torch.nn.functional.scaled_dot_product_attention itself, Swin only
after timm.layers.set_fused_attn(True, experimental=True).
"""

from __future__ import annotations

from timm.layers import LayerNorm

from fused_attn import nn
from fused_attn.nn._from_torch import REPLACEMENTS


def register() -> None:
    """Let modules of exactly timm.layers.LayerNorm be swapped; calling it again changes nothing.

    It computes what torch.nn.LayerNorm does: what it adds is another constructor, and a flag for
    faster kernels under autocast. LayerNorm2d and others that compute something else stay alone.
    """
    REPLACEMENTS[LayerNorm] = nn.LayerNorm
