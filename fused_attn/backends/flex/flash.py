"""Backend "flex_flash": FlexAttention with the kernels of FlashAttention-4.

torch generates CuTe kernels for Hopper and Blackwell from our mask and score functions
(`kernel_options={"BACKEND": "FLASH"}`). The package flash-attn-4 must be installed.
"""

from __future__ import annotations

import torch

from fused_attn.backends import verdicts
from fused_attn.backends.flash import engines
from fused_attn.backends.flex import BLOCK_SIZE, FlexBackend
from fused_attn.backends.machine import capability_of
from fused_attn.backends.problem import NormProblem, Problem
from fused_attn.call.attention import AttentionCall

PACKAGE = "flash-attn-4"
# The first version without a race in the backward with block lists. The race made gradients wrong
# or NaN (https://github.com/Dao-AILab/flash-attention/pull/2756).
MIN_VERSION = "4.0.0b26"
HOPPER, BLACKWELL = 9, (10, 11)
# For a larger head_dim, the tiles of forward and backward differ, so no BlockMask block size suits
# both.
MAX_HEAD_DIM = 128


class FlexFlashBackend(FlexBackend):
    """torch's FlexAttention on FlashAttention-4, differentiated by autograd."""

    name = "flex_flash"
    engine = "FLASH"
    replaces_eager = False

    def unavailable(self) -> list[str]:
        reasons = super().unavailable() + engines.missing(PACKAGE, MIN_VERSION)
        return reasons or engines.no_gpu()

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = super().unsupported(problem)
        if isinstance(problem, NormProblem):
            return reasons
        if problem.device.type != "cuda":
            return [*reasons, f"runs on cuda, not on {problem.device.type}"]
        capability = capability_of(problem.device)
        if capability is not None and capability // 10 not in (HOPPER, *BLACKWELL):
            architecture = f"compute capability {capability // 10}.x"
            reasons.append(f"runs on Hopper and Blackwell, not on {architecture}")
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"does not support {problem.dtype}")
        sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        for name, size in sizes.items():
            if size % 8 or size > MAX_HEAD_DIM:
                most = f"in multiples of 8 up to {MAX_HEAD_DIM}"
                reasons.append(f"supports {name} {most}, not {size}")
        if problem.learned_bias:
            reasons.append("does not support the gradient of a bias")
        if problem.result == "lse" and problem.needs_grad:
            # in torch 2.13; torch 2.14 supports it on some GPUs
            reasons.append("cannot backpropagate through lse")
        if problem.needs_grad and torch.are_deterministic_algorithms_enabled():
            reasons.append("does not support a deterministic backward")
        return reasons

    def block_size(self, call: AttentionCall) -> tuple[int, int]:
        block_q, block_k = BLOCK_SIZE
        capability = capability_of(call.query.device)
        if call.query.shape[2] <= block_q or (capability or 0) // 10 not in BLACKWELL:
            return BLOCK_SIZE
        # On Blackwell, each thread block of the forward processes two query tiles.
        return 2 * block_q, block_k


verdicts.KERNELS[FlexFlashBackend.name] = verdicts.KERNELS[FlexBackend.name]
