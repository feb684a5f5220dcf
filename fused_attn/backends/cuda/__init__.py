"""CUDA backend "cuda" (csrc/cuda), for NVIDIA GPUs of compute capability 8.0 and later.

module.py               the compiled module, or its emulation in the tests
attention.py, norm.py   conversion of calls to the fields of csrc/params.h
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fused_attn.backends import verdicts
from fused_attn.backends.base import Backend
from fused_attn.backends.cuda import attention, norm
from fused_attn.backends.cuda.module import compiled, emulated, unavailable, use_module
from fused_attn.backends.problem import AttentionProblem, Problem, kernel_limits, too_old
from fused_attn.call.calls import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    NormBackward,
    NormCall,
    NormGradients,
    NormOutputs,
)
from fused_attn.call.kv_cache import CacheUpdate

__all__ = ["CudaBackend", "emulated", "use_module"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class CudaBackend(Backend):
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
            reasons += too_old(problem.device)
        if isinstance(problem, AttentionProblem) and 0 in (problem.head_dim, problem.head_dim_v):
            reasons.append("does not support head_dim 0")  # kernels cannot address empty rows
        return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        return verdicts.reasons_against(self.name, problem)

    def tile_summary(self, tensor: Tensor) -> Tensor:
        return attention.tile_summary(tensor)

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        outputs = call.outputs(for_backward)
        attention.attention_fwd(call, outputs)
        return outputs

    def attention_bwd(self, work: AttentionBackward) -> AttentionGradients:
        grads = work.call.gradients(work.needs_bias)
        attention.attention_bwd(work, grads)
        return grads

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        weights = call.weights(average)
        attention.attention_weights(call, lse, lse_residual, average, weights)
        return weights

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate
    ) -> tuple[Tensor, Tensor] | None:
        return attention.attention_decode(call, update)

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        outputs = call.outputs()
        norm.norm_fwd(call, outputs)
        return outputs

    def norm_bwd(self, work: NormBackward) -> NormGradients:
        grads = work.call.gradients(work.needs_weight, work.needs_bias)
        norm.norm_bwd(work, grads)
        return grads


def _kernel_files() -> Iterator[Path]:
    """Yield the Python files of this package, and the compiled module in place of its sources."""
    yield from Path(__file__).parent.glob("*.py")
    if compiled() is not None:
        yield Path(compiled().__file__)


verdicts.KERNELS[CudaBackend.name] = _kernel_files
