"""Small questions about torch: is this plain eager execution, may values be read, what type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_PLAIN_TYPES = (Tensor, Parameter)


def plain_eager(*tensors: Tensor | None) -> bool:
    """Nothing watches the calls: no compile or export, no mode, no subclass, no functorch.

    Then a kernel may be called without going through ``torch.ops``.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    return all(tensor is None or type(tensor) in _PLAIN_TYPES for tensor in tensors)


def transformed() -> bool:
    """Under a torch.func transform or with forward-mode tangents, which no kernel can follow."""
    return not torch.compiler.is_compiling() and in_transform()


def in_transform() -> bool:
    """The same for code that torch.compile does not trace into."""
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def readable(tensor: Tensor) -> bool:
    """Values can be looked at without a device synchronisation or a graph break."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return False
    return plain_eager(tensor)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of lse, mean, rstd and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32
