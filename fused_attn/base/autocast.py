"""Casts that the ops apply under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast float32 and 16-bit tensors to the autocast dtype, as torch does for attention.

    Without autocast, and for other dtypes (also unsupported ones), tensors are returned unchanged.
    """
    device_type = tensors[0].device.type
    if not autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple([t.to(dtype) if t.dtype in _CAST else t for t in tensors])


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast_norm(input: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast to float32 under autocast on CUDA, as torch does for norms; the CPU keeps any dtype."""
    device_type = input.device.type
    if device_type != "cuda" or not autocasts(device_type) or input.dtype == torch.float64:
        return input, residual
    return input.float(), None if residual is None else residual.float()


# True if autocast is enabled for any device type; torch.compile cannot trace it.
any_autocast = torch._C._is_any_autocast_enabled


def autocasts(device_type: str) -> bool:
    """Return True if autocast is enabled for a device type."""
    if torch.compiler.is_compiling():
        # torch.compile of 2.9 and 2.10 cannot trace is_autocast_available. Of the devices that it
        # compiles for, only meta lacks autocast.
        available = device_type != "meta"
    else:
        available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)
