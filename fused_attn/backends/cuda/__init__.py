"""The CUDA kernels (csrc/cuda), for NVIDIA GPUs of compute capability 8.0 and later.

module.py               the compiled module, or its emulation in the tests
attention.py, norm.py   tensors to the fields of csrc/params.h
calls.py                the same for calls that look like an earlier one
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import weights_bwd
from fused_attn.backends.cuda.attention import (
    attention_bwd,
    attention_decode,
    attention_fwd,
    attention_weights,
    tile_summary,
)
from fused_attn.backends.cuda.calls import attention_call
from fused_attn.backends.cuda.module import emulated, unavailable, use_module
from fused_attn.backends.cuda.norm import norm_bwd, norm_fwd
from fused_attn.backends.problem import AttentionProblem, Problem, kernel_limits, too_old

__all__ = [
    "attention_bwd",
    "attention_call",
    "attention_decode",
    "attention_fwd",
    "attention_weights",
    "attention_weights_bwd",
    "emulated",
    "norm_bwd",
    "norm_fwd",
    "not_automatic",
    "tile_summary",
    "unavailable",
    "unsupported",
    "use_module",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def unsupported(problem: Problem) -> list[str]:
    """Why this backend does not take a problem; empty if it does."""
    reasons = unavailable()
    device, own = problem.device.type, "cpu" if emulated() else "cuda"
    if device != own:
        reasons.append(f"runs on {own}, not on {device}")
    elif device == "cuda" and not reasons:
        reasons += too_old(problem.device)
    if isinstance(problem, AttentionProblem) and 0 in (problem.head_dim, problem.head_dim_v):
        reasons.append("takes no head_dim of 0")  # its rows have no addresses
    return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)


def not_automatic() -> list[str]:
    """Why this backend is chosen only where it is asked for by name."""
    return ["has not run on a GPU yet: it is chosen by name only"]


def attention_weights_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `cpp.attention_weights_bwd`, in eager math."""
    return weights_bwd.attention_weights_bwd(*args)
