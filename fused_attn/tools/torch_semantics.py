"""Adaptation of checks to backends, mainly to those that wrap torch's kernels.

Such a backend (`Backend.wraps_torch`) has torch's semantics for dropout and NaN, and torch
specifies no accuracy.
"""

from __future__ import annotations

from dataclasses import replace

from fused_attn.backends import get_backend
from fused_attn.tools.cases import Shape
from fused_attn.tools.checks import AttentionCheck, Check
from fused_attn.tools.contract import Finding

# Factor by which errors of torch's kernels may exceed the contract's limit. On CPUs, errors reach
# 1.0 times the limit. On GPUs, kernels round the weights to 16 bits before dividing by their sum,
# and some compute float32 as three products of TF32. All checks on an H200 are within this factor.
TORCH_FACTOR = 4.0


def exception(backend: str, check: Check, on_gpu: bool) -> str:
    """Return the reason why a check does not apply to a backend; empty if it applies."""
    one_key = False
    if isinstance(check, AttentionCheck):
        one_key = check.gradients and Shape.parse(check.shape).seqlen_k == 1
        if on_gpu and one_key and check.result == "lse":
            return "with one key, dP - delta is 0 only up to rounding, but exactly 0 in eager"
    if not get_backend(backend).wraps_torch:
        return ""
    if check.how == "bits":
        return "torch's generator decides which weights are dropped"
    if check.how == "contract" and getattr(check, "dropout_p", 0.0) > 0.0:
        return "torch's generator drops different weights than that of eager attention"
    if on_gpu and check.how != "contract" and check.gradients:
        return "torch's backward sums in any order, unless deterministic algorithms are enabled"
    if isinstance(check, AttentionCheck):
        if one_key:
            return "with one key, gradients are 0 up to rounding in torch, but exactly 0 in eager"
        if check.poison:
            return "NaN in masked keys may reach the results"
        if "alibi" in check.mask and check.dtype != "float32":
            return "torch rounds the ALiBi bias to 16 bits"
    return ""


def adapted(backend: str, check: Check) -> Check:
    """Return a check without lse if it has gradients: torch's lse is not differentiable."""
    if not get_backend(backend).wraps_torch or not isinstance(check, AttentionCheck):
        return check
    return replace(check, result="out") if check.result == "lse" and check.gradients else check


def loosened(finding: Finding) -> Finding:
    """Return a finding with the limit for torch's kernels."""
    where = f"{finding.where}, {TORCH_FACTOR:g} times that for torch's kernels"
    return replace(finding, limit=TORCH_FACTOR * finding.limit, where=where)
