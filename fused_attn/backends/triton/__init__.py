"""The Triton kernels, for NVIDIA (sm_80 and later) and AMD (gfx942) GPUs.

Triton is imported, and kernels are compiled, when a problem first comes here. With
TRITON_INTERPRET=1 in the environment the same kernels run, slowly, on CPU tensors: the tests do.

    masks.py, tiles.py      what a mask lets through, and which tiles of it (device code, and lists)
    forward.py, backward.py, bias_grad.py, weights.py, decode.py, norm.py    the kernels
    attention.py, norm_host.py                               tensors to their arguments
    tuning.py               tile sizes, warps and stages
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import weights_bwd
from fused_attn.backends.problem import Problem, kernel_limits, too_old

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
HIP_ARCHS = ("gfx942",)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unavailable() -> list[str]:
    """Why this backend cannot run on this machine."""
    if not _has_triton():
        return ["triton is not installed"]
    if not torch.cuda.is_available() and not interpreted():
        return ["torch sees no GPU"]
    return []


def unsupported(problem: Problem) -> list[str]:
    """Why this backend does not take a problem; empty if it does."""
    reasons = unavailable()
    device = problem.device.type
    if device != "cuda" and not (interpreted() and device == "cpu"):
        reasons.append(f"runs on cuda, not on {device}")
    elif device == "cuda" and not reasons:
        reasons += _too_old(problem.device)
    return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)


def not_automatic() -> list[str]:
    """Why this backend is chosen only where it is asked for by name."""
    return ["has not run on a GPU yet: it is chosen by name only"]


def attention_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `cpp.attention_fwd`."""
    return _attention().attention_fwd(*args)


def attention_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `cpp.attention_bwd`."""
    return _attention().attention_bwd(*args)


def attention_weights(*args: Any) -> Tensor:
    """As `cpp.attention_weights`."""
    return _attention().attention_weights(*args)


def attention_weights_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `cpp.attention_weights_bwd`, in eager math."""
    return weights_bwd.attention_weights_bwd(*args)


def norm_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `cpp.norm_fwd`."""
    return _norm().norm_fwd(*args)


def norm_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `cpp.norm_bwd`."""
    return _norm().norm_bwd(*args)


def tile_summary(tensor: Tensor) -> Tensor:
    """As `cpp.tile_summary`."""
    return _attention().tile_summary(tensor)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _too_old(device: torch.device) -> list[str]:
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        wanted = ", ".join(HIP_ARCHS)
        return [] if arch in HIP_ARCHS else [f"runs on {wanted}, not on {arch}"]
    return too_old(device)


def _attention() -> Any:
    from fused_attn.backends.triton import attention

    return attention


def _norm() -> Any:
    from fused_attn.backends.triton import norm_host

    return norm_host
