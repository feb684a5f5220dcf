"""Dtype casts of attention and norm inputs under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import is_compiling


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast float32, float16 and bfloat16 tensors to the autocast dtype, as torch does for SDPA.

    Tensors of other dtypes are returned unchanged, as are all tensors if autocast is disabled for
    the device of the first tensor.
    """
    device_type = tensors[0].device.type
    if not autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple([t.to(dtype) if t.dtype in _CAST else t for t in tensors])


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast_norm(input: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast the inputs of a norm to float32 under autocast on CUDA, as torch does.

    float64 tensors and tensors on other devices are returned unchanged.
    """
    device_type = input.device.type
    if device_type != "cuda" or not autocasts(device_type) or input.dtype == torch.float64:
        return input, residual
    return input.float(), None if residual is None else residual.float()


# Returns True if autocast is enabled for any device type. torch.compile cannot trace it.
any_autocast = torch._C._is_any_autocast_enabled


def autocasts(device_type: str) -> bool:
    """Return True if autocast is enabled for a device type."""
    if is_compiling():
        # torch.compile cannot trace is_autocast_available in torch 2.9 and 2.10. Of the devices
        # that torch.compile supports, only meta has no autocast.
        available = device_type != "meta"
    else:
        available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)
