"""Packages and GPUs of this machine: versions and compute capabilities."""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata

import torch

from fused_attn.base.torch_state import traced_as_constant

# Not a function: torch 2.11 cannot trace find_spec.
HAS_TRITON = importlib.util.find_spec("triton") is not None

MIN_CAPABILITY = 80  # first with bfloat16 and asynchronous copies


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed. It is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@traced_as_constant
def capability_of(device: torch.device) -> int | None:
    """Return the compute capability of a GPU, 90 for 9.0; None without a GPU.

    It is not a pair of numbers, because torch 2.11 cannot trace comparisons of constant tuples.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def too_old(device: torch.device) -> list[str]:
    """Return the reason why an NVIDIA GPU is too old for the kernels; empty if it is not."""
    capability = capability_of(device)
    if capability is None or capability >= MIN_CAPABILITY:
        return []
    return [f"requires compute capability 8.0 or higher, not {capability / 10}"]
