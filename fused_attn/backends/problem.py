"""Problems: the properties of a call that the choice of a backend may depend on."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import torch

from fused_attn.core.call import AttentionCall, NormCall
from fused_attn.core.torch_state import transformed


@dataclass(frozen=True)
class AttentionProblem:
    """The properties of a call of scaled_dot_product_attention."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    bias_dtype: torch.dtype | None = None
    transformed: bool = False  # under a torch.func transform, or with forward-mode tangents


@dataclass(frozen=True)
class NormProblem:
    """The properties of a call of layer_norm or rms_norm."""

    device: torch.device
    dtype: torch.dtype
    num_columns: int
    transformed: bool = False


Problem = AttentionProblem | NormProblem


def problem_of(call: AttentionCall | NormCall) -> Problem:
    """The properties of a call that the choice depends on."""
    if isinstance(call, NormCall):
        input = call.input
        return NormProblem(input.device, input.dtype, input.shape[1], transformed())
    query, bias = call.query, call.mask.bias
    return AttentionProblem(
        query.device,
        query.dtype,
        query.shape[3],
        call.value.shape[3],
        None if bias is None else bias.dtype,
        transformed(),
    )


def kernel_limits(
    problem: Problem, dtypes: Collection[torch.dtype], max_head_dim: int
) -> list[str]:
    """Reasons why kernels for these types and head dimensions do not take a problem."""
    reasons = [] if problem.dtype in dtypes else [f"has no {problem.dtype}"]
    if problem.transformed:
        reasons.append("has no derivatives under torch.func and in forward mode")
    if isinstance(problem, AttentionProblem):
        sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        reasons += [
            f"takes {name} up to {max_head_dim}, not {size}"
            for name, size in sizes.items()
            if size > max_head_dim
        ]
        if problem.bias_dtype is not None and problem.bias_dtype not in dtypes:
            reasons.append(f"has no float mask of {problem.bias_dtype}")
    return reasons


MIN_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies


@functools.cache
def too_old(device: torch.device) -> list[str]:
    """Reasons why an NVIDIA GPU is too old for the kernels; empty if it is not."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return []
    return [f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"]
