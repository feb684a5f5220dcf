"""Small calls, which torch's own kernels finish before ours have been called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fused_attn.backends.registry import asks_for_a_backend

# Elements of a layer norm up to which torch's kernels are as fast as ours, and the call is shorter:
# 2.5 to 4 us against 6.4, and 30 us less in training, where ours is a Function in Python. torch's
# time over ours, Intel with AMX, columns 64 to 768, one and two threads: forward 0.6 to 1.1 for
# 2^14 elements, 0.9 to 1.5 for 2^16; training 0.5 to 0.85 for 2^16, 0.7 to 1.1 for 2^17, 0.8 to 1.5
# for 2^18. Rows that are not contiguous are copied first by both. torch's RMS norm is several
# operations, and slower from the smallest size on.
FORWARD_ELEMENTS, TRAINING_ELEMENTS = 1 << 14, 1 << 17

_PLAIN = (Tensor, Parameter)


def layer_norm(
    input: Any, normalized_shape: int | Sequence[int], weight: Any, bias: Any, eps: Any
) -> Tensor | None:
    """torch's own layer norm if it is the faster one here; None if it is not, or refuses."""
    if torch.compiler.is_compiling() or type(input) not in _PLAIN:
        return None
    count = input.numel()
    if count > TRAINING_ELEMENTS or asks_for_a_backend():
        return None
    shape = (normalized_shape,) if type(normalized_shape) is int else normalized_shape
    try:
        trains = torch.is_grad_enabled() and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        if count > FORWARD_ELEMENTS and not trains and input.stride(-1) == 1:
            return None
        if input.is_cpu and not input.is_nested:
            return torch.layer_norm(input, shape, weight, bias, eps)  # type: ignore[arg-type]
    except (AttributeError, IndexError, RuntimeError, TypeError):
        pass  # validation has the message
    return None
