"""Backend "flex_flash": FlexAttention with the kernels of FlashAttention-4.

They are CuTe kernels for Hopper and Blackwell, which torch generates with our mask and score
functions (`kernel_options={"BACKEND": "FLASH"}`). The package flash-attn-4 must be installed.
"""

from __future__ import annotations

from importlib import metadata

import torch
from packaging.version import Version

from fused_attn.backends import verdicts
from fused_attn.backends.denylist import BLOCK_SPARSE
from fused_attn.backends.flex import BLOCK_SIZE, FlexBackend, kernel_files
from fused_attn.backends.problem import NormProblem, Problem
from fused_attn.call.calls import AttentionCall

PACKAGE = "flash-attn-4"
MIN_VERSION = Version("4.0.0b26")  # the first without the race of denylist.BLOCK_SPARSE
HOPPER, BLACKWELL = 9, (10, 11)
# For a larger head_dim, the tiles of forward and backward differ, so no BlockMask block size suits
# both.
MAX_HEAD_DIM = 128


class FlexFlashBackend(FlexBackend):
    """torch's FlexAttention on FlashAttention-4, differentiated by autograd."""

    name = "flex_flash"
    engine = "FLASH"

    def unavailable(self) -> list[str]:
        return super().unavailable() + _missing()

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = super().unsupported(problem)
        if isinstance(problem, NormProblem):
            return reasons
        if problem.device.type != "cuda":
            return [*reasons, f"runs on cuda, not on {problem.device.type}"]
        if torch.cuda.is_available():
            major = torch.cuda.get_device_capability(problem.device)[0]
            if major not in (HOPPER, *BLACKWELL):
                reasons.append(f"runs on Hopper and Blackwell, not on capability {major}")
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"has no {problem.dtype}")
        sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        for name, size in sizes.items():
            if size % 8 or size > MAX_HEAD_DIM:
                reasons.append(f"takes {name} in multiples of 8 up to {MAX_HEAD_DIM}, not {size}")
        if problem.learned_bias:
            reasons.append("has no gradient of a bias")
        if problem.result == "lse" and problem.needs_grad:
            reasons.append("has no gradient of lse")  # torch 2.13; 2.14 has it on some GPUs
        if problem.needs_grad and torch.are_deterministic_algorithms_enabled():
            reasons.append("has no deterministic backward")
        return reasons

    def replaces_eager(self, problem: Problem) -> bool:
        return False

    def block_size(self, call: AttentionCall) -> tuple[int, int]:
        block_q, block_k = BLOCK_SIZE
        if call.query.shape[2] <= block_q or not torch.cuda.is_available():
            return BLOCK_SIZE
        # On Blackwell, each thread block of the forward processes two query tiles.
        major = torch.cuda.get_device_capability(call.query.device)[0]
        return (2 * block_q, block_k) if major in BLACKWELL else BLOCK_SIZE


def _missing() -> list[str]:
    """Return why flash-attn-4 cannot be used here; empty if it can."""
    version = _installed()
    if version is None:
        return [f"{PACKAGE} is not installed"]
    if version < MIN_VERSION:
        return [f"needs {PACKAGE} {MIN_VERSION}, not {version}: it {BLOCK_SPARSE.effect}"]
    return [] if torch.cuda.is_available() else ["torch sees no GPU"]


def _installed() -> Version | None:
    """Return the version of flash-attn-4, or None."""
    try:
        return Version(metadata.version(PACKAGE))
    except metadata.PackageNotFoundError:
        return None


# torch.compile calls the function while tracing, and treats the result as a constant.
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


verdicts.KERNELS[FlexFlashBackend.name] = kernel_files
