"""Kernel launches, and the GPU properties that they depend on. Does not import Triton."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch


def interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Arch:
    """Properties of a GPU that tile sizes depend on.

    Attributes:
        name: an NVIDIA architecture such as "sm_90", an AMD architecture such as "gfx942", or
            "interpreter".
        num_cores: number of streaming multiprocessors (NVIDIA) or compute units (AMD).
    """

    name: str
    num_cores: int


@functools.cache
def arch_of(device: torch.device) -> Arch:
    """Return the Arch of a device, or a fixed one for the interpreter."""
    if interpreted():
        return Arch("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Arch(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Arch(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def launch(
    kernel: Any, device: torch.device, grid: tuple[int, ...], *args: Any, **meta: Any
) -> None:
    """Launch a Triton kernel on the device of its tensors.

    Args:
        grid: one to three sizes. The second and third must be below 65536.
        args: the other arguments of the kernel.
        meta: compile-time arguments, including num_warps and num_stages.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)
