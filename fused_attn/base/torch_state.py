"""Predicates on torch's global state and on tensors: interception, autograd, streams, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Both autograd and functorch have batched tensors. The Python type of both is torch.Tensor.
_batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor
_batched_by_vmap = torch._C._functorch.is_batchedtensor

TENSOR_TYPES = frozenset({Tensor, Parameter})  # the types without overridden operations
PLAIN_TYPES = TENSOR_TYPES | {type(None)}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # dtypes of operands


Function = TypeVar("Function", bound=Callable[..., Any])


def traced_as_constant(function: Function) -> Function:
    """Make torch.compile evaluate the function while tracing, with a constant result.

    Equivalent to torch.compiler.assume_constant_result, which would import all of torch._dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def plain_eager(*tensors: Tensor | None) -> bool:
    """Return True if nothing intercepts the call and no tensor is batched or of a subclass.

    In this case, a kernel may be called directly instead of through ``torch.ops``.
    """
    if is_intercepted() or not PLAIN_TYPES.issuperset(map(type, tensors)):
        return False
    # A generator would take longer than the check.
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and _batched_by_autograd(tensor):  # see `batched`
            return False
    return True


def is_compiling() -> bool:
    """Return True in code that torch.compile or torch.export runs or traces on this thread.

    From torch 2.13 on, torch.compiler.is_compiling() is True on all threads while one compiles.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces this as a constant
        return True
    if not torch.compiler._is_compiling_flag:  # is_compiling() would take two more calls
        return False
    return torch._C._len_torch_dispatch_stack() > 0 or TracingContext.try_get() is not None


def is_intercepted() -> bool:
    """Return True if torch intercepts calls, which must then use ``torch.ops`` or the reference.

    Calls are intercepted under torch.compile, export, jit.trace, a dispatch or function mode, a
    functorch transform, and forward-mode AD.
    """
    return bool(
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def batched(*tensors: Tensor | None) -> bool:
    """Return True if any tensor is batched by autograd or by torch.vmap.

    Autograd batches gradients for is_grads_batched=True, which jacobian and hessian use with
    vectorize=True to compute all gradients in one backward.
    """
    for tensor in tensors:
        if tensor is not None and (_batched_by_autograd(tensor) or _batched_by_vmap(tensor)):
            return True
    return False


def transformed() -> bool:
    """Return True under a torch.func transform or forward-mode AD, which no kernel supports.

    Under torch.compile the result is False, except for per-sample gradients, vmap(grad(...)).
    """
    if torch.compiler.is_dynamo_compiling():
        return _gradients_per_sample()
    return not is_compiling() and in_transform()


@traced_as_constant
def _gradients_per_sample() -> bool:
    """Return True under both vmap and grad, where Dynamo cannot trace an autograd.Function."""
    keys = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    kinds = torch._C._functorch.TransformType
    return kinds.Vmap in keys and kinds.Grad in keys


def in_transform() -> bool:
    """Return True under a torch.func transform or forward-mode AD.

    In contrast to `transformed`, the result does not depend on torch.compile. Do not call this
    in code that torch.compile traces.
    """
    return (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return True if grad mode is enabled and any of the tensors requires grad."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # a generator takes 0.6 us longer
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def has_tangent(*tensors: Tensor) -> bool:
    """Return True if any of the tensors is a dual number of forward-mode AD."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def host_readable(tensor: Tensor) -> bool:
    """Return True if values can be read on the host without a device sync or a graph break.

    The tensor must be a plain CPU tensor, and nothing may trace the call. Modes that do not trace,
    such as that of torch.set_default_device, are permitted.
    """
    if tensor.device.type != "cpu":
        return False
    return plain_eager(tensor) or (not is_compiling() and _readable_in_modes(tensor))


def _readable_in_modes(tensor: Tensor) -> bool:
    if type(tensor) not in TENSOR_TYPES or batched(tensor) or in_transform():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return not any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def savable(tensor: Tensor) -> bool:
    """Return True if an autograd.Function may save the tensor for its backward.

    With grad mode enabled, a tensor created under torch.inference_mode must be cloned instead.
    """
    return is_compiling() or not tensor.is_inference() or not torch.is_grad_enabled()


def captured(tensor: Tensor) -> bool:
    """Return True if the tensor is on a GPU and the current stream is capturing a CUDA graph.

    The tensor may have other values when the graph is replayed, so values derived from it must be
    computed in the graph, not read from a cache.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """Return the handle of the device's current CUDA stream; 0 for other devices.

    Caches have a separate entry for each stream, because a value cached on another stream might not
    be computed yet, and its memory might be reused while a kernel reads it.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, mean, rstd and accumulators for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
