"""Triton kernels for NVIDIA (sm_80 and later) and AMD (gfx942) GPUs.

The first call to this backend imports Triton and compiles the kernels. If the environment variable
TRITON_INTERPRET is 1, Triton's interpreter runs the kernels, slowly, on CPU tensors. The tests use
the interpreter with the patches in tests/support/triton_interpreter.py.

    masks.py                        mask evaluation within a tile (device code)
    tiles.py                        classification of tiles (device code), kernels that list tiles
    attention_tile.py, philox.py    device code shared by the kernels
    forward.py, backward.py, bias_grad.py, weights.py, decode.py, norm.py    the kernels
    attention.py, norm_host.py      host code that launches the kernels
    tuning.py                       tile sizes, warps and stages
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fused_attn.backends import verdicts
from fused_attn.backends.kernels import KernelBackend
from fused_attn.backends.machine import HAS_TRITON, too_old
from fused_attn.backends.problem import Problem, kernel_limits
from fused_attn.backends.triton.launch import interpreted
from fused_attn.base.torch_state import traced_as_constant

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
HIP_ARCHS = ("gfx942",)


class TritonBackend(KernelBackend):
    """Backend of Triton kernels, which are compiled on the first call."""

    name = "triton"

    def unavailable(self) -> list[str]:
        if not HAS_TRITON:
            return ["triton is not installed"]
        if not torch.cuda.is_available() and not interpreted():
            return ["requires a GPU, but torch finds none"]
        return []

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        device = problem.device.type
        if device != "cuda" and not (interpreted() and device == "cpu"):
            reasons.append(f"runs on cuda, not on {device}")
        elif device == "cuda" and not reasons:
            reasons += _too_old(problem.device)
        return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)

    def attention_host(self) -> Any:
        from fused_attn.backends.triton import attention

        return attention

    def norm_host(self) -> Any:
        from fused_attn.backends.triton import norm_host

        return norm_host


verdicts.KERNELS[TritonBackend.name] = lambda: Path(__file__).parent.glob("*.py")


@traced_as_constant
def _too_old(device: torch.device) -> list[str]:
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        wanted = ", ".join(HIP_ARCHS)
        return [] if arch in HIP_ARCHS else [f"runs on {wanted}, not on {arch}"]
    return too_old(device)
