"""Drop-in fused masked attention and norms for PyTorch, forward and backward."""

from importlib import import_module as _import_module
from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "fused_attn requires torch 2.9 or newer: pip install torch"
    raise ModuleNotFoundError(message, name="torch") from None

from fused_attn import masks, nn
from fused_attn.backends import available_backends, use_backend
from fused_attn.call.call_counts import stats
from fused_attn.decode import decode_attention
from fused_attn.functional import (
    layer_norm,
    rms_norm,
    rotary_embedding,
    scaled_dot_product_attention,
    varlen_attention,
)
from fused_attn.integrations import register_with_transformers
from fused_attn.integrations.enable import disable, enable, enabled, register_with_torch
from fused_attn.integrations.inductor import compile_pass
from fused_attn.masks import Mask
from fused_attn.swap import SwapReport, swap_modules
from fused_attn.tools.compare import compare
from fused_attn.tools.comparison import ComparisonReport
from fused_attn.version import __version__ as __version__

__all__ = [
    "ComparisonReport",
    "Mask",
    "SwapReport",
    "available_backends",
    "compare",
    "compile_pass",
    "decode_attention",
    "disable",
    "enable",
    "enabled",
    "layer_norm",
    "masks",
    "nn",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "stats",
    "swap_modules",
    "use_backend",
    "varlen_attention",
]

register_with_torch()
register_with_transformers()


def __getattr__(name: str) -> _Any:
    """Import `fused_attn.distributed` on first use, because it imports torch.distributed."""
    if name == "distributed":
        return _import_module("fused_attn.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
