"""Small norms, computed by torch's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fused_attn.backends.registry import backend_is_set
from fused_attn.base import small_calls
from fused_attn.base.autocast import any_autocast
from fused_attn.base.torch_state import needs_grad

_PLAIN = (Tensor, Parameter)


def layer_norm(
    input: Any,
    normalized_shape: int | Sequence[int],
    weight: Any,
    bias: Any,
    eps: Any,
    residual: Any,
) -> tuple[Tensor, Tensor] | None:
    """Compute out and residual + input with torch's layer norm.

    Return None if our kernels are faster or the arguments need validation. Both torch and our
    kernels copy rows that are not contiguous.
    """
    if torch.compiler.is_compiling() or type(input) not in _PLAIN:
        return None
    count, limits = input.numel(), small_calls.limits
    if count > limits.norm_training or backend_is_set():
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
        total = input if residual is None else residual + input
        return torch.layer_norm(total, shape, weight, bias, eps), total  # type: ignore[arg-type]
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None  # validation raises it with a message
