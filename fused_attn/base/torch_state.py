"""Queries of torch's state: interception of calls, host-readable values, streams, dtypes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# torch has two kinds of batched tensors. Neither is visible in the Python type.
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
    """Return True if a tensor is batched by torch.autograd.grad with is_grads_batched.

    jacobian and hessian use it with vectorize=True: one backward computes all gradients.
    """
    return _batched_by_autograd(tensor) or (other is not None and _batched_by_autograd(other))


def batched(*tensors: Tensor | None) -> bool:
    """Return True if any tensor is batched, by autograd or by torch.vmap."""
    return any(
        tensor is not None and (_batched_by_autograd(tensor) or _batched_by_vmap(tensor))
        for tensor in tensors
    )


def transformed() -> bool:
    """Return True under a torch.func transform or forward-mode AD, but not torch.compile.

    No kernel supports them.
    """
    return not torch.compiler.is_compiling() and in_transform()


def in_transform() -> bool:
    """Return True as `transformed` does, in code that torch.compile does not trace into."""
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return True if autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def host_readable(tensor: Tensor) -> bool:
    """Return True if values can be read without a device synchronisation or a graph break."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return False
    return plain_eager(tensor)


def savable(tensor: Tensor) -> bool:
    """Return True if autograd can save the tensor, or does not record operations.

    It can save only a copy of a tensor created under torch.inference_mode.
    """
    return torch.compiler.is_compiling() or not tensor.is_inference() or not torch.is_grad_enabled()


def captured(tensor: Tensor) -> bool:
    """Return True if the tensor is on a GPU and the current stream captures a CUDA graph.

    The values may differ when the graph is replayed, so cached values must not be used in it.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """Return the device's current stream, 0 on the CPU.

    Cached values are separate for each stream. On another stream a value may not be computed yet,
    and its memory may be reused while it is read.
    """
    if device == _CPU or device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, mean, rstd and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32
