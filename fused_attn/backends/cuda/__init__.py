"""CUDA backend "cuda" (csrc/cuda), for NVIDIA GPUs of compute capability 8.0 and later.

module.py               the compiled module, or its emulation in the tests
attention.py, norm.py   conversion of calls to the fields of csrc/params.h
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import verdicts
from fused_attn.backends.cuda import attention, norm
from fused_attn.backends.cuda.module import (
    compiled,
    emulated,
    launch_obstacle,
    unavailable,
    use_module,
)
from fused_attn.backends.kernels import KernelBackend
from fused_attn.backends.machine import too_old
from fused_attn.backends.problem import AttentionProblem, Problem, kernel_limits
from fused_attn.call.attention import AttentionCall
from fused_attn.call.kv_cache import CacheUpdate, check_pages

__all__ = ["CudaBackend", "emulated", "use_module"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class CudaBackend(KernelBackend):
    """Backend of CUDA C++ kernels, which are compiled when the package is built."""

    name = "cuda"

    def unavailable(self) -> list[str]:
        return unavailable()

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        device, own = problem.device.type, "cpu" if emulated() else "cuda"
        if device != own:
            reasons.append(f"runs on {own}, not on {device}")
        elif device == "cuda" and not reasons:
            reasons += too_old(problem.device) or launch_obstacle(problem.device)
        if isinstance(problem, AttentionProblem) and 0 in (problem.head_dim, problem.head_dim_v):
            reasons.append("does not support head_dim 0")  # kernels cannot address empty rows
        return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)

    def attention_host(self) -> Any:
        return attention

    def norm_host(self) -> Any:
        return norm

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate, want_lse: bool
    ) -> tuple[Tensor, Tensor] | None:
        check_pages(update)  # an invalid page would crash an emulated kernel
        return attention.attention_decode(self.readable(call, update.capacity), update)


def _kernel_files() -> Iterator[Path]:
    """Yield the Python files of this package, and the compiled module in place of its sources."""
    yield from Path(__file__).parent.glob("*.py")
    if compiled() is not None:
        yield Path(compiled().__file__)


verdicts.KERNELS[CudaBackend.name] = _kernel_files
