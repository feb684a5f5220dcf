"""Kernel launches, and the GPU properties that they depend on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fused_attn.backends.triton.interpreter import interpreted


@dataclass(frozen=True)
class Arch:
    """Properties of a GPU that tile sizes depend on.

    Attributes:
        name: "sm_90" or another NVIDIA architecture, "gfx942", or "interpreter".
        num_cores: streaming multiprocessors, or compute units.
    """

    name: str
    num_cores: int


@functools.cache
def arch_of(device: torch.device) -> Arch:
    """Return the architecture of a device, or that of the interpreter."""
    if interpreted():
        return Arch("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Arch(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Arch(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def launch(
    kernel: Any, device: torch.device, grid: tuple[int, ...], *args: Any, **meta: Any
) -> None:
    """Launch a kernel on the tensors' device.

    Args:
        grid: up to three sizes; the second and third below 65536.
        meta: compile-time arguments, including num_warps and num_stages.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)
