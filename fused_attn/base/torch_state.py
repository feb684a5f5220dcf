"""Small questions about torch: is this plain eager execution, may values be read, what type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# torch has two ways to batch. Neither shows in the type of a tensor.
_batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor
_batched_by_vmap = torch._C._functorch.is_batchedtensor

PLAIN_TYPES = frozenset({Tensor, Parameter, type(None)})
_CPU = torch.device("cpu")


def plain_eager(*tensors: Tensor | None) -> bool:
    """Return True if nothing intercepts the call and no tensor is of a subclass.

    Then a kernel may be called without going through ``torch.ops``.
    """
    return not is_intercepted() and PLAIN_TYPES.issuperset(map(type, tensors))


def is_intercepted() -> bool:
    """Return True under torch.compile, export, jit.trace, a dispatch or function mode, a functorch
    transform, or forward-mode AD. Calls must then go through ``torch.ops`` or the reference."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def batched_by_autograd(tensor: Tensor, other: Tensor | None = None) -> bool:
    """A tensor stands for many: torch.autograd.grad with is_grads_batched, which jacobian and
    hessian call if they vectorize, runs a backward once for all of them."""
    return _batched_by_autograd(tensor) or (other is not None and _batched_by_autograd(other))


def batched(*tensors: Tensor | None) -> bool:
    """The same, or by torch.vmap."""
    return any(
        tensor is not None and (_batched_by_autograd(tensor) or _batched_by_vmap(tensor))
        for tensor in tensors
    )


def transformed() -> bool:
    """Under a torch.func transform or with forward-mode tangents, which no kernel can follow."""
    return not torch.compiler.is_compiling() and in_transform()


def in_transform() -> bool:
    """The same for code that torch.compile does not trace into."""
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return True if autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def host_readable(tensor: Tensor) -> bool:
    """Values can be looked at without a device synchronisation or a graph break."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return False
    return plain_eager(tensor)


def savable(tensor: Tensor) -> bool:
    """autograd can save the tensor, if it records: not one of torch.inference_mode, but a copy."""
    return torch.compiler.is_compiling() or not tensor.is_inference() or not torch.is_grad_enabled()


def captured(tensor: Tensor) -> bool:
    """Values are read by a CUDA graph in the making: they will be others when it is replayed.

    What is derived of them there is the graph's own, and nothing from outside may stand in for it.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The device's current stream, 0 on the CPU.

    What is kept from one call for the next was computed on a stream; on another it may not be there
    yet, and its memory may be given away while it is read. So each stream keeps its own.
    """
    if device == _CPU or device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of lse, mean, rstd and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32
