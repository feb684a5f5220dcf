"""The autograd.Functions of the ops, and the functions that apply them.

Kernels compute first-order gradients, and second_order.py differentiates a backward. `apply`
receives the call, and its tensors once more as arguments, which autograd and torch.compile track.

torch.export would record the forward of a Function without gradients. Exported programs therefore
call the ops, which apply the Functions at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, get_backend, reference
from fused_attn.base.flat import FlatT
from fused_attn.base.torch_state import is_compiling, plain_eager
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionOutputs,
    WeightsBackward,
)
from fused_attn.call.norm import NormBackward, NormCall, NormOutputs
from fused_attn.ops import library
from fused_attn.ops.second_order import with_second_order


def attention(
    call: AttentionCall, backend: Backend, outputs: AttentionOutputs | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return out and lse of a call, with gradients; lse is None without want_lse.

    Args:
        outputs: results of the forward if it has run; otherwise, it runs through its op.
    """
    if torch.compiler.is_exporting():
        outputs = library.attention_fwd(call, backend, True, want_lse)
        return outputs.out, outputs.lse if want_lse else None
    call, tensors = _tracked(call)
    results = _Attention.apply(call, backend, outputs, 2 if want_lse else 1, *tensors)
    return results if want_lse else (results, None)


def attention_for_weights(call: AttentionCall, backend: Backend) -> tuple[Tensor, ...]:
    """Return out, lse and lse_residual of a call, for `weights`; out and lse have gradients."""
    if torch.compiler.is_exporting():
        return library.attention_fwd(call, backend, True, True)[:3]
    call, tensors = _tracked(call)
    return _Attention.apply(call, backend, None, 3, *tensors)


def weights(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool, backend: Backend
) -> Any:
    """Return the attention weights of a call (see `AttentionCall.weights`), with gradients."""
    if torch.compiler.is_exporting():
        return library.attention_weights(call, lse, lse_residual, average, backend)
    call, tensors = _tracked(call)
    return _Weights.apply(call, lse, lse_residual, average, backend, *tensors)


def norm(call: NormCall, backend: Backend, outputs: NormOutputs | None) -> Any:
    """Return out and total of a norm call, with gradients. For `outputs`, see `attention`."""
    if torch.compiler.is_exporting():
        return library.norm_fwd(call, backend, True, call.has_total)[:2]
    call, tensors = _tracked(call)
    return _Norm.apply(call, backend, outputs, 2, *tensors)


_BIAS = AttentionCall.TENSORS.index("bias")
_NORM_WEIGHT, _NORM_BIAS = NormCall.TENSORS.index("weight"), NormCall.TENSORS.index("bias")
# Number of arguments of `apply` before the tensors.
_ATTENTION_FIRST, _WEIGHTS_FIRST, _NORM_FIRST = 4, 5, 4


# Do not define setup_context: `apply` would inspect signatures on every call, which takes longer
# than a small kernel. Only functorch transforms require it, and they use the reference.


class _Attention(Function):
    """Autograd Function of `attention`. `forward` runs the op if `outputs` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        backend: Backend,
        outputs: AttentionOutputs | None,
        count: int,
        *tensors: Tensor | None,
    ) -> Any:
        if outputs is None:
            outputs = library.attention_fwd(call, backend, True, True)
        ctx.set_materialize_grads(False)
        _mark_statistics(ctx, outputs[2:count])
        _save(ctx, *outputs, *tensors)
        ctx.call, ctx.backend = call.with_tensors(()), backend
        return outputs.out if count == 1 else outputs[:count]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None, *_: Any) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, lse_residual, out_residual, *tensors = _saved(ctx)
        call, backend = ctx.call.with_tensors(tensors), ctx.backend
        outputs = AttentionOutputs(out, lse, lse_residual, out_residual)
        grad = torch.zeros_like(out) if grad_out is None else grad_out
        needs_bias = _needs(ctx, _ATTENTION_FIRST + _BIAS)
        work = AttentionBackward(call, outputs, grad, grad_lse, needs_bias)
        grads: Any = None
        if backend.accepts_unchecked and _runs_kernels(grad, grad_lse):
            grads = backend.attention_bwd(work)
        if grads is None:
            grads = with_second_order(
                partial(library.attention_bwd, work, backend), call, call.DIFFERENTIABLE,
                (grad, grad_lse), reference.attention,
            )  # fmt: skip
        query, key, value, bias = grads
        grads = (query, key, value, bias if needs_bias else None)[: len(tensors)]
        return (*(None,) * _ATTENTION_FIRST, *grads, *(None,) * (len(tensors) - len(grads)))


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        lse: Tensor,
        lse_residual: Tensor,
        average: bool,
        backend: Backend,
        *tensors: Tensor | None,
    ) -> Tensor:
        _save(ctx, lse, lse_residual, *tensors)
        ctx.call, ctx.average, ctx.backend = call.with_tensors(()), average, backend
        return library.attention_weights(call, lse, lse_residual, average, backend)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        lse, lse_residual, *tensors = _saved(ctx)
        call, average = ctx.call.with_tensors(tensors), ctx.average
        needs_bias = _needs(ctx, _WEIGHTS_FIRST + _BIAS)
        work = WeightsBackward(call, lse, lse_residual, grad_weights, average, needs_bias)
        run = partial(library.attention_weights_bwd, work, ctx.backend)

        def weights(call: AttentionCall) -> tuple[Tensor]:
            return (reference.attention_weights(call, average),)

        grads = with_second_order(run, call, ("query", "key", "bias"), (grad_weights,), weights)
        by_name = {"query": grads[0], "key": grads[1]}
        if needs_bias:
            by_name["bias"] = grads[2]
        return (*(None,) * _WEIGHTS_FIRST, *call.by_tensor(**by_name)[: len(tensors)])


class _Norm(Function):
    """Autograd Function of `norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: NormCall,
        backend: Backend,
        outputs: NormOutputs | None,
        count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if outputs is None:
            outputs = library.norm_fwd(call, backend, True, True)
        ctx.set_materialize_grads(False)
        _mark_statistics(ctx, outputs[2:count])
        # The backward kernel needs only the sum, which equals input without residual and dropout.
        # Second-order gradients differentiate the reference, which needs input and residual.
        total = outputs.total if call.has_total else call.input
        _save(ctx, total, outputs.mean, outputs.rstd, *tensors)
        ctx.call, ctx.backend = call.with_tensors(()), backend
        return outputs[:count]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None, *_: Any) -> Any:
        total, mean, rstd, *tensors = _saved(ctx)
        call, backend = ctx.call.with_tensors(tensors), ctx.backend
        if not call.has_total:
            grad_total = None  # total is empty; torch.compile passes zeros as its gradient
        if grad_out is None and grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = _needs(ctx, _NORM_FIRST + _NORM_WEIGHT), _needs(ctx, _NORM_FIRST + _NORM_BIAS)
        grad = torch.zeros_like(total) if grad_out is None else grad_out
        of_total = NormCall(total, None, call.weight, call.bias, call.options)
        work = NormBackward(of_total, mean, rstd, grad, grad_total, *needs)
        grads: Any = None
        if backend.accepts_unchecked and _runs_kernels(grad, grad_total):
            grads = backend.norm_bwd(work)
        if grads is None:
            grads = _norm_gradients(call, work, backend)
        return (*(None,) * _NORM_FIRST, *_by_norm_tensor(call, grads, needs)[: len(tensors)])


def _needs(ctx: Any, index: int) -> bool:
    """Return True if autograd needs the gradient of argument `index` of `apply`."""
    return ctx.needs_input_grad[index : index + 1] == (True,)


def _norm_gradients(call: NormCall, work: NormBackward, backend: Backend) -> Any:
    """Return gradients of input, sum, weight and bias, differentiable with create_graph=True."""
    mean = None if work.mean is None else work.mean.contiguous()
    run = partial(library.norm_bwd, work._replace(mean=mean, rstd=work.rstd.contiguous()), backend)
    # Without dropout, the gradients of input and residual both equal the gradient of the sum.
    dropped = call.options.dropout_p > 0.0
    of_sum = "residual" if call.residual is not None else None if dropped else "input"
    names = ("input" if dropped else None, of_sum, "weight", "bias")
    return with_second_order(run, call, names, (work.grad_out, work.grad_total), reference.norm)


def _by_norm_tensor(
    call: NormCall, grads: Sequence[Tensor], needs: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a norm in the order of `NormCall.TENSORS`, in their dtypes."""
    of_input, of_sum, of_weight, of_bias = grads
    weight, bias = call.weight, call.bias
    return (
        of_input if call.options.dropout_p > 0.0 else of_sum,
        None if call.residual is None else of_sum,
        of_weight.to(weight.dtype) if weight is not None and needs[0] else None,
        of_bias.to(bias.dtype) if bias is not None and needs[1] else None,
        None,
        None,
    )


def _tracked(call: FlatT) -> tuple[FlatT, Sequence[Tensor | None]]:
    """Return a call and its tensors as arguments for the `apply` of a Function.

    Trailing Nones are omitted, because each argument takes time. Under torch.compile, which rejects
    the same tensor twice, repeated tensors are replaced by views.
    """
    tensors = call.tensors()
    if is_compiling():
        different: list[Tensor | None] = []
        for tensor in tensors:
            if tensor is not None and any(tensor is other for other in different):
                tensor = tensor.view_as(tensor)
            different.append(tensor)
        tensors = tuple(different)
        call = call.with_tensors(tensors)
    count = len(tensors)
    while tensors[count - 1] is None:
        count -= 1
    return call, tensors[:count]


def _runs_kernels(grad: Tensor | None, other: Tensor | None) -> bool:
    """Return True if a backward may call kernels directly: eager, first-order and unbatched."""
    return not torch.is_grad_enabled() and plain_eager(grad, other)


def _mark_statistics(ctx: Any, outputs: Sequence[Tensor | None]) -> None:
    """Mark the outputs that have no gradients."""
    if outputs:
        ctx.mark_non_differentiable(*(t for t in outputs if t is not None))


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]


def _saved(ctx: Any) -> list[Any]:
    """Return the stored tensors, cast back if a saved-tensor hook changed their dtype."""
    pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t, dtype in pairs]


# ---- gradients of the ops -----------------------------------------------------------------------


def _differentiable_attention(
    call: AttentionCall, for_backward: bool, want_lse: bool, backend: str
) -> Any:
    call, tensors = _tracked(call)
    results = _Attention.apply(call, get_backend(backend), None, 4, *tensors)
    outputs = AttentionOutputs(*results)
    if not for_backward:
        lse = outputs.lse if want_lse else None
        outputs = AttentionOutputs(outputs.out, lse, None, None)
    return outputs.without_none()


def _differentiable_weights(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool, backend: str
) -> Tensor:
    call, tensors = _tracked(call)
    return _Weights.apply(call, lse, lse_residual, average, get_backend(backend), *tensors)


def _differentiable_norm(call: NormCall, backend: str) -> Any:
    call, tensors = _tracked(call)
    results = _Norm.apply(call, get_backend(backend), None, 4, *tensors)
    return NormOutputs(*results).without_none()


library.register_autograd("attention_fwd", AttentionCall, _differentiable_attention)
library.register_autograd("attention_weights", AttentionCall, _differentiable_weights)
library.register_autograd("norm_fwd", NormCall, _differentiable_norm)
