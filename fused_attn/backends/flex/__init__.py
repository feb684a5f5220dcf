"""Backend "flex": torch's FlexAttention, with block lists computed from mask structure.

FlexAttention generates a Triton kernel for each kind of mask (Dong et al. 2024, "Flex Attention").
It skips fully masked blocks, returns a differentiable lse, and computes the gradient of a bias. A
block mask of torch's create_block_mask needs all seqlen_q x seqlen_k positions. Here it is computed
from intervals (masks/intervals.py).

    operands.py     the tensors of a mask, cached on it
    functions.py    mask_mod, score_mod and the call of FlexAttention
    compiled.py     compiled functions
    flash.py        backend "flex_flash": FlashAttention-4's kernels, which FlexAttention generates
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from fused_attn.backends import reference, verdicts
from fused_attn.backends.kernels import EngineBackend
from fused_attn.backends.machine import HAS_TRITON, capability_of, too_old
from fused_attn.backends.problem import AttentionProblem, NormProblem, Problem, kernel_limits
from fused_attn.backends.sdpa import SdpaBackend
from fused_attn.base.torch_state import is_compiling, is_intercepted, needs_grad
from fused_attn.call.attention import AttentionCall, AttentionOutputs
from fused_attn.call.options import with_options

if TYPE_CHECKING:  # the modules import torch._dynamo, so the first call imports them
    from fused_attn.backends.flex.functions import Variant
    from fused_attn.backends.flex.operands import Operands

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cuda", "xpu", "cpu")
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Compute capabilities with 99 KB of shared memory, too little for the tiles of torch's backward of
# head_dim 129 to 256. It is compiled in the backward, too late to select another backend
# (pytorch/pytorch#198224).
SMALL_SHARED_MEMORY = (86, 89, 120, 121)
# FlexAttention supports other block sizes only if its tiles divide them; 128 is its default.
BLOCK_SIZE = (128, 128)


def _missing_features() -> list[str]:
    """Return the reasons why this torch's FlexAttention cannot be used; empty if it can.

    The source is searched, because importing it takes a second and imports torch._dynamo.
    """
    source = Path(torch.__file__).parent / "nn" / "attention" / "flex_attention.py"
    text = source.read_text("utf-8") if source.exists() else ""
    features = {"AuxRequest": "class AuxRequest", "kernel_options BACKEND": "BACKEND: NotRequired"}
    return [
        f"requires FlexAttention with {name}, which torch {torch.__version__} lacks"
        for name, definition in features.items()
        if definition not in text
    ]


_MISSING_FEATURES = _missing_features()


class FlexBackend(EngineBackend):
    """torch's FlexAttention, differentiated by autograd."""

    name = "flex"
    engine: ClassVar[str] = "TRITON"
    replaces_eager: ClassVar[bool] = True

    def block_size(self, call: AttentionCall) -> tuple[int, int]:
        """Return the number of queries and of keys per block."""
        return BLOCK_SIZE

    def fallback_warning(self, device_type: str) -> str | None:
        return (
            "fused_attn runs attention calls with large score matrices on FlexAttention (backend "
            '"flex"), because no other torch kernel supports them. FlexAttention compiles a kernel '
            "for each kind of call, which can take minutes"
        )

    def unavailable(self) -> list[str]:
        return list(_MISSING_FEATURES)

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        if isinstance(problem, NormProblem):
            return reasons
        device = problem.device.type
        if device not in DEVICES:
            reasons.append(f"runs on {', '.join(DEVICES)}, not on {device}")
        elif device != "cpu":
            reasons += too_old(problem.device) if HAS_TRITON else ["triton is not installed"]
        elif problem.needs_grad:
            reasons.append("does not support gradients on the CPU")
        elif problem.result == "lse":
            reasons.append("cannot return lse on the CPU")
        reasons += kernel_limits(problem, DTYPES, MAX_HEAD_DIM)
        if min(problem.head_dim, problem.head_dim_v) < MIN_HEAD_DIM:
            small = min(problem.head_dim, problem.head_dim_v)
            reasons.append(
                f"requires head_dim and head_dim_v of at least {MIN_HEAD_DIM}, not {small}"
            )
        has_large = problem.needs_grad and max(problem.head_dim, problem.head_dim_v) > 128
        if has_large and capability_of(problem.device) in SMALL_SHARED_MEMORY:
            reasons.append("has no backward for head_dim above 128 on this GPU")
        if problem.dropout:
            reasons.append("does not support dropout")
        if problem.partial:
            reasons.append("does not support partial results (attention over part of the keys)")
        if problem.result == "weights":
            reasons.append("cannot return attention weights")
        if problem.learned_bias and torch.are_deterministic_algorithms_enabled():
            reasons.append("accumulates the gradient of a bias in a nondeterministic order")
        return reasons

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        # The default would otherwise be eager attention, which materializes large score matrices.
        instead_of_eager = (
            self.replaces_eager
            and isinstance(problem, AttentionProblem)
            and problem.large_scores
            and SdpaBackend().unsupported(problem)
        )
        if instead_of_eager and not verdicts.found_wrong(self.name, problem):
            return []
        return super().opt_in_reasons(problem)

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        from fused_attn.backends.flex import compiled, functions

        query, key, value = call.query, call.key, call.value
        if 0 in query.shape or 0 in key.shape or 0 in value.shape:
            return AttentionOutputs(*reference.attention(call), None, None)
        if self.engine == "FLASH" and float(call.options.scale) <= 0.0:  # see with_positive_scale
            query, scale = reference.with_positive_scale(query, float(call.options.scale))
            call = replace(with_options(call, scale=scale), query=query)
        variant, operands = variant_of(call, want_lse, self.engine, self.block_size(call))
        if is_compiling():
            results = functions.attend(variant, query, key, value, operands)
        elif is_intercepted():  # without compilation, FlexAttention ignores blocks
            results = reference.attention(call)
        else:
            made = compiled.run(variant, query, key, value, operands)
            results = reference.attention(call) if made is None else made
        return AttentionOutputs(*results, None, None)


def variant_of(
    call: AttentionCall,
    want_lse: bool,
    engine: str = "TRITON",
    block_size: tuple[int, int] = BLOCK_SIZE,
) -> tuple[Variant, Operands]:
    """Return the variant of a call, and its operands."""
    from fused_attn.backends.flex.functions import Variant
    from fused_attn.backends.flex.operands import operands_of

    query, key, value = call.query, call.key, call.value
    operands, pattern = operands_of(call, block_size)
    sizes = [query.shape[0], query.shape[2], key.shape[2]]
    if operands.lists is not None:
        sizes += operands.lists.kv_indices.shape[2:]  # the pattern determines the other sizes
    bias = operands.bias
    constants = (
        query.shape[1], key.shape[1], query.shape[3], value.shape[3], query.dtype,
        None if bias is None else bias.dtype, needs_grad(query, key, value, bias),
        *[size == 1 for size in sizes],
    )  # fmt: skip
    scale, softcap = float(call.options.scale), float(call.options.softcap)
    device_type = query.device.type
    variant = Variant(pattern, scale, softcap, want_lse, engine, block_size, device_type, constants)
    return variant, operands


verdicts.KERNELS[FlexBackend.name] = lambda: Path(__file__).parent.glob("*.py")
