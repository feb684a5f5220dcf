"""The types in which autocast wants the ops to compute."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, float32 and 16-bit tensors in its type, as torch does for attention; others,
    wrong ones among them, stay."""
    device_type = tensors[0].device.type
    if not autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple([t.to(dtype) if t.dtype in _CAST else t for t in tensors])


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast_norm(input: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Under autocast, the types that torch gives its norms: float32 on CUDA, any on the CPU."""
    device_type = input.device.type
    if device_type != "cuda" or not autocasts(device_type) or input.dtype == torch.float64:
        return input, residual
    return input.float(), None if residual is None else residual.float()


# Whether autocast is on for any devices; not for torch.compile to trace.
any_autocast = torch._C._is_any_autocast_enabled


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a type of devices."""
    if torch.compiler.is_compiling():
        # torch.compile of 2.9 and 2.10 cannot trace the question. It runs where autocast is, but
        # for tensors without a device.
        available = device_type != "meta"
    else:
        available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)
