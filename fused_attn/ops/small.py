"""Dispatch of small layer norms to torch's kernels, which have less overhead than ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.registry import wanted_backend
from fused_attn.base import small_calls
from fused_attn.base.autocast import any_autocast
from fused_attn.base.torch_state import TENSOR_TYPES, is_compiling, needs_grad


def layer_norm(
    input: Any,
    normalized_shape: int | Sequence[int],
    weight: Any,
    bias: Any,
    eps: Any,
    residual: Any,
) -> tuple[Tensor, Tensor] | None:
    """Compute out and residual + input with torch's layer norm, if the call is small.

    Training calls are small up to limits.norm_training elements, and inference calls up to
    limits.norm_forward (half of it with a residual). Inference calls whose rows are not contiguous
    have the limit of training, because both torch and our kernels copy such rows.

    Returns:
        None if our kernels are faster or the arguments need validation.
    """
    if is_compiling() or type(input) not in TENSOR_TYPES:
        return None
    count, limits = input.numel(), small_calls.limits
    if count > limits.norm_training:
        return None
    shape = (normalized_shape,) if type(normalized_shape) is int else normalized_shape
    limit = limits.norm_forward
    try:
        if residual is not None:
            limit //= 2
            if residual.shape != input.shape or residual.dtype != input.dtype:
                return None
        if (
            count > limit
            and input.stride(-1) == 1
            and not needs_grad(input, weight, bias, residual)
        ):
            return None
        if not input.is_cpu or input.is_nested or any_autocast():
            return None
        if wanted_backend(compiling=False) or (weight is None and bias is not None):
            return None  # torch (2.13) lacks derivatives of a bias without a weight
        total = input if residual is None else residual + input
        return torch.layer_norm(total, shape, weight, bias, eps), total  # type: ignore[arg-type]
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None  # validation raises the error again, with a message
