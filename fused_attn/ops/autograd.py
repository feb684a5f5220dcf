"""Execution of attention and norm calls, and the autograd.Functions of the ops.

First-order gradients are computed by kernels; second_order.py differentiates a backward. `apply`
receives the call, and its tensors again as arguments, which autograd and torch.compile track.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, problem_of, reference, select
from fused_attn.backends.registry import backend_for_unchecked, get_backend, wanted_backend
from fused_attn.base.flat import Flat
from fused_attn.base.torch_state import is_intercepted, needs_grad
from fused_attn.call.call_counts import counting
from fused_attn.call.calls import (
    AttentionBackward,
    AttentionCall,
    AttentionOutputs,
    NormBackward,
    NormCall,
    NormOutputs,
    WeightsBackward,
    with_options,
)
from fused_attn.call.handlers import (
    check_no_dtensors,
    dtensors,
    handler_of,
    is_dtensor,
    tensors_of,
)
from fused_attn.call.unchecked import UncheckedAttention, UncheckedNorm
from fused_attn.call.validation import checked_attention, checked_norm
from fused_attn.masks.spec import MaskSpec, with_summaries
from fused_attn.ops import library as ops
from fused_attn.ops.saving import (
    leading_tensors,
    needs_input_grad,
    rebuilt,
    runs_kernels,
    save,
    saved,
    without_aliases,
)
from fused_attn.ops.second_order import differentiated
from fused_attn.ops.seeds import new_seed
from fused_attn.ops.sinks import add_sinks, checked_sinks


def attention(
    call: UncheckedAttention, want_lse: bool, named: str | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run an unchecked attention call, with validation only if the backend requires it.

    Args:
        named: name of the backend that the caller requested, or None.
        sinks: (num_heads,) or None; see ops/sinks.py.

    Returns:
        out and lse, in the caller's shapes. lse may be None without want_lse.

    Raises:
        ValueError, TypeError: an argument is invalid.
        NotImplementedError: the named backend does not support the call.
    """
    if sinks is not None:
        out, lse = attention(call, True, named)
        assert lse is not None
        given = call.attn_mask
        packed = isinstance(given, MaskSpec) and given.cu_seqlens_q is not None
        logits = dtensors().sinks_like(lse, sinks) if is_dtensor(lse) else sinks
        return add_sinks(out, lse, checked_sinks(logits, lse), packed=packed)
    handler = handler_of(call.query)
    if handler is not None:
        return handler.attention(call, want_lse, named)
    results = _try_unchecked(call, want_lse, named) if not is_intercepted() else None
    if results is not None:
        if counting:
            _count(call, backend_for_unchecked(call, call.query.device, named))
        return results
    check_no_dtensors("query", call.query, key=call.key, value=call.value)
    for tensor in tensors_of(call.attn_mask):
        check_no_dtensors("query", call.query, attn_mask=tensor)
    checked, leading = checked_attention(call)
    out, lse = attention_by_choice(call, checked, want_lse, named)
    return in_shape(out, lse, leading)


def attention_by_choice(
    given: UncheckedAttention, checked: AttentionCall, want_lse: bool, named: str | None
) -> tuple[Tensor, Tensor | None]:
    """Run a validated call on the backend that is selected for it, and count the `given` call."""
    backend = select(problem_of(checked, "lse" if want_lse else "out"), named)
    if counting and not torch.compiler.is_compiling():
        _count(given, backend)
    out, lse = attention_by(checked, backend, want_lse)
    return out, lse if want_lse else None


def in_shape(
    out: Tensor, lse: Tensor | None, leading: tuple[int, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the results of a validated call in the caller's shapes; see `checked_attention`."""
    if leading is None:  # packed
        return out[0].transpose(0, 1), None if lse is None else lse[0]
    if len(leading) == 3:
        return out, lse
    return out.reshape(*leading, out.shape[-1]), None if lse is None else lse.reshape(leading)


def _count(call: UncheckedAttention | AttentionCall, backend: Backend | None) -> None:
    """Count a call in all open `stats()` blocks."""
    reason = f"backend {backend.name}" if backend is not None and backend.differentiable else ""
    for counts in counting:
        counts.add(reason, call.query, call.key)


def _try_unchecked(
    call: UncheckedAttention, want_lse: bool, named: str | None
) -> tuple[Tensor, Tensor | None] | None:
    """Run an unchecked call and return out and lse; return None if it needs validation."""
    backend = backend_for_unchecked(call, call.query.device, named) if call.prepare() else None
    if backend is None:
        return None
    if backend.differentiable:
        outputs = backend.attention_fwd(call, False, want_lse)
        return None if outputs is None else (outputs.out, outputs.lse)
    spec = call.resolve_mask()
    if spec is None:
        return None
    needs_grad = torch.is_grad_enabled() and (
        call.query.requires_grad
        or call.key.requires_grad
        or call.value.requires_grad
        or (spec.bias is not None and spec.bias.requires_grad)
    )
    # Tile summaries are cached on the spec. The spec of a mask tensor is used by this call alone,
    # so compute its summaries here only for a backward. Otherwise the forward computes them.
    read = spec.dense is not None or spec.bias is not None
    if read and (needs_grad or not isinstance(call.attn_mask, Tensor)):
        with_summaries(spec, backend.tile_summary)
    packed = needs_grad and spec.cu_seqlens_q is not None and call.query.dim() == 3
    given = call.query, call.key, call.value
    if packed:  # the backward supports packed sequences only as 4-D tensors with a batch of 1
        call.query, call.key, call.value = (t.transpose(0, 1)[None] for t in given)
    outputs = backend.attention_fwd(call, needs_grad, want_lse)
    if outputs is None:
        call.query, call.key, call.value = given
        return None
    if not needs_grad:
        return outputs.out, outputs.lse
    results = _Attention.apply(call, backend, outputs, 2 if want_lse else 1, *leading_tensors(call))
    out, lse = results if want_lse else (results, None)
    if not packed:
        return out, lse
    return out[0].transpose(0, 1), None if lse is None else lse[0]


def attention_by(
    call: AttentionCall, backend: Backend, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a validated call on a backend and return out and lse, which may be None if not wanted."""
    call = _seeded(call, backend)
    if backend.differentiable:
        outputs = backend.attention_fwd(call, False, want_lse)
        assert outputs is not None  # validated calls are not refused
        return outputs[:2]
    call = _kernel_layout(call, backend)
    if not _needs_grad(call):
        return ops.attention_fwd(call, backend, False, want_lse)[:2]
    call = without_aliases(call) if torch.compiler.is_compiling() else call
    results = _Attention.apply(call, backend, None, 2 if want_lse else 1, *leading_tensors(call))
    return results if want_lse else (results, None)


def weights_by_choice(
    call: AttentionCall, average: bool, named: str | None
) -> tuple[Tensor, Tensor]:
    """Run a validated call as `attention_with_weights`, on the backend that is selected for it."""
    return attention_with_weights(call, average, select(problem_of(call, "weights"), named))


def attention_with_weights(
    call: AttentionCall, average: bool, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Run a validated call; return out, and its attention weights (see `AttentionCall.weights`)."""
    if counting and not torch.compiler.is_compiling():
        _count(call, backend)
    call = _seeded(call, backend)
    if backend.differentiable:
        return backend.attention_with_weights(call, average)
    call = _kernel_layout(call, backend)
    needs_grad = _needs_grad(call)
    if needs_grad:
        call = without_aliases(call) if torch.compiler.is_compiling() else call
        out, lse, lse_residual = _Attention.apply(call, backend, None, 3, *leading_tensors(call))
    else:
        out, lse, lse_residual, _ = ops.attention_fwd(call, backend, True, True)
    # Detach lse: the gradient of the weights with respect to query, key and bias already includes
    # the path through lse.
    lse = lse.detach()
    if needs_grad:
        return out, _Weights.apply(call, lse, lse_residual, average, backend, *call.tensors())
    return out, ops.attention_weights(call, lse, lse_residual, average, backend)


def norm(call: UncheckedNorm, want_total: bool, named: str | None) -> tuple[Tensor, Tensor | None]:
    """Run an unchecked norm call; return out and the sum residual + dropout(input).

    The sum may be None without want_total. For `named`, see `attention`.
    """
    results = _try_unchecked_norm(call, want_total, named) if not is_intercepted() else None
    if results is not None:
        return results
    if is_dtensor(call.input):
        out, total = dtensors().norm(call, want_total, named)
        return out, total
    check_no_dtensors(
        "input", call.input, weight=call.weight, bias=call.bias, residual=call.residual
    )
    out, total = norm_by_choice(checked_norm(call), want_total, named)
    return norm_in_shape(out, total, call.input.shape)


def norm_by_choice(
    call: NormCall, want_total: bool, named: str | None
) -> tuple[Tensor, Tensor | None]:
    """Run a validated norm call on the backend that is selected for it."""
    backend = select(problem_of(call), named)
    # Under torch.compile, default to torch's norm, which Inductor fuses with adjacent operations.
    if torch.compiler.is_compiling() and not named and call.options.dropout_p == 0.0:
        backend = backend if wanted_backend() else get_backend("sdpa")
    return norm_by(call, backend, want_total)


def norm_in_shape(
    out: Tensor, total: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """Return the results of a validated norm call in the shape of the caller's input."""
    if out.shape == shape:
        return out, total
    return out.reshape(shape), None if total is None else total.reshape(shape)


def _try_unchecked_norm(
    call: UncheckedNorm, want_total: bool, named: str | None
) -> tuple[Tensor, Tensor | None] | None:
    """Run an unchecked norm call and return as `norm` does, or None if it needs validation."""
    backend = backend_for_unchecked(call, call.input.device, named) if call.prepare() else None
    if backend is None:
        return None
    needs_grad = (
        not backend.differentiable
        and torch.is_grad_enabled()
        and (
            call.input.requires_grad
            or (call.weight is not None and call.weight.requires_grad)
            or (call.bias is not None and call.bias.requires_grad)
            or (call.residual is not None and call.residual.requires_grad)
        )
    )
    if needs_grad and len(call.normalized_shape) != 1:
        return None  # the backward supports only one normalized dimension
    input = call.input
    if not input.is_nested and input.dim() > 0 and input.stride(-1) != 1:
        call.input = input.contiguous()
    outputs = backend.norm_fwd(call, needs_grad, want_total)
    if outputs is None:
        return None
    if needs_grad:
        out, total = _Norm.apply(call, backend, outputs, *leading_tensors(call))
    else:
        out, total = outputs[:2]
    return out, total if call.has_total else call.input


def norm_by(call: NormCall, backend: Backend, want_total: bool) -> tuple[Tensor, Tensor | None]:
    """Run a validated norm call on a backend; return out and the sum, as `norm` does."""
    call = _seeded(call, backend)
    if backend.differentiable:
        outputs = backend.norm_fwd(call, False, want_total)
        assert outputs is not None  # validated calls are not refused
        out, total = outputs[:2]
    elif _needs_grad(call):
        call = without_aliases(call) if torch.compiler.is_compiling() else call
        out, total = _Norm.apply(call, backend, None, *leading_tensors(call))
    else:
        out, total = ops.norm_fwd(call, backend, False, want_total)[:2]
    return out, total if call.has_total else call.input


def _seeded(call: Any, backend: Backend) -> Any:
    """Return the call, with a new dropout seed if it has dropout and no seed."""
    options = call.options
    if options.dropout_p == 0.0 or options.seed is not None or backend.wraps_torch:
        return call
    return with_options(call, seed=new_seed(call.tensors()[0].device))


def _kernel_layout(call: AttentionCall, backend: Backend) -> AttentionCall:
    """Return the call in `kernel_layout()`, with tile summaries of its dense tensors."""
    call = call.kernel_layout()
    mask = with_summaries(call.mask, backend.tile_summary)
    return call if mask is call.mask else replace(call, mask=mask)


def _needs_grad(call: Flat) -> bool:
    return needs_grad(*call.tensors())


_BIAS = AttentionCall.TENSORS.index("bias")
_NORM_WEIGHT, _NORM_BIAS = NormCall.TENSORS.index("weight"), NormCall.TENSORS.index("bias")


# Do not define setup_context: `apply` would inspect signatures on every call, which takes longer
# than a small kernel. Only functorch transforms require it, and they use the reference.


class _Attention(Function):
    """Autograd Function of attention. Returns the first `count` fields of AttentionOutputs.

    Args:
        outputs: outputs of a forward that has run already. If None, `forward` runs the op, as
            torch.compile requires.
        tensors: see `leading_tensors`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall | UncheckedAttention,
        backend: Backend,
        outputs: AttentionOutputs | None,
        count: int,
        *tensors: Tensor | None,
    ) -> Any:
        if outputs is None:
            assert isinstance(call, AttentionCall)
            outputs = ops.attention_fwd(call, backend, True, True)
        ctx.set_materialize_grads(False)
        if count > 2:
            ctx.mark_non_differentiable(*outputs[2:count])
        save(ctx, *outputs, *tensors)
        ctx.call, ctx.backend, ctx.first = call.without_tensors(), backend, 4
        return outputs.out if count == 1 else outputs[:count]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None, *_: Any) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, lse_residual, out_residual, *tensors = saved(ctx)
        call, backend = rebuilt(ctx.call, tensors), ctx.backend
        outputs = AttentionOutputs(out, lse, lse_residual, out_residual)
        given = torch.zeros_like(out) if grad_out is None else grad_out
        needs_bias = needs_input_grad(ctx, _BIAS)
        what = AttentionBackward(call, outputs, given, grad_lse, needs_bias)
        grads: Any = None
        if backend.accepts_unchecked and runs_kernels(given, grad_lse):
            grads = backend.attention_bwd(what)
        if grads is None:
            call = call.kernel_layout()
            what = what._replace(call=call, outputs=outputs.kernel_layout())
            grads = differentiated(
                partial(ops.attention_bwd, what, backend), call, call.DIFFERENTIABLE,
                (given, grad_lse), reference.attention,
            )  # fmt: skip
        query, key, value, bias = grads
        grads = (query, key, value, bias if needs_bias else None)[: len(tensors)]
        return (*(None,) * 4, *grads, *(None,) * (len(tensors) - len(grads)))


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
        save(ctx, lse, lse_residual, *tensors)
        ctx.call, ctx.average, ctx.backend = call.without_tensors(), average, backend
        ctx.first = 5
        return ops.attention_weights(call, lse, lse_residual, average, backend)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        lse, lse_residual, *tensors = saved(ctx)
        call, average = ctx.call.with_tensors(tensors).kernel_layout(), ctx.average
        needs_bias = needs_input_grad(ctx, _BIAS)

        what = WeightsBackward(call, lse, lse_residual, grad_weights, average, needs_bias)
        run = partial(ops.attention_weights_bwd, what, ctx.backend)

        def weights(call: AttentionCall) -> tuple[Tensor]:
            return (reference.attention_weights(call, average),)

        grads = differentiated(run, call, ("query", "key", "bias"), (grad_weights,), weights)
        by_name = {"query": grads[0], "key": grads[1]}
        if needs_bias:
            by_name["bias"] = grads[2]
        return (None, None, None, None, None, *call.by_tensor(**by_name))


class _Norm(Function):
    """Autograd Function of a norm. Returns out and total. For the arguments, see `_Attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: NormCall | UncheckedNorm,
        backend: Backend,
        outputs: NormOutputs | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if outputs is None:
            assert isinstance(call, NormCall)
            outputs = ops.norm_fwd(call, backend, True, True)
        ctx.set_materialize_grads(False)
        # The backward kernel needs only the sum, which is input without residual and dropout.
        # Second-order gradients differentiate the reference, which needs input and residual.
        total = outputs.total if call.has_total else call.input
        save(ctx, total, outputs.mean, outputs.rstd, *tensors)
        ctx.call, ctx.backend, ctx.first = call.without_tensors(), backend, 3
        return outputs[:2]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None) -> Any:
        total, mean, rstd, *tensors = saved(ctx)
        call, backend = rebuilt(ctx.call, tensors), ctx.backend
        if not call.has_total:
            grad_total = None  # total is empty; torch.compile passes zeros as its gradient
        if grad_out is None and grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = needs_input_grad(ctx, _NORM_WEIGHT), needs_input_grad(ctx, _NORM_BIAS)
        given = torch.zeros_like(total) if grad_out is None else grad_out
        what = NormBackward(call.of_total(total), mean, rstd, given, grad_total, *needs)
        grads: Any = None
        if backend.accepts_unchecked and runs_kernels(given, grad_total):
            grads = backend.norm_bwd(what)
        if grads is None:
            grads = _norm_gradients(call, what, backend)
        return (None, None, None, *_by_norm_tensor(call, grads, needs)[: len(tensors)])


def _norm_gradients(call: NormCall, given: NormBackward, backend: Backend) -> Any:
    """Return gradients of input, sum, weight and bias, differentiable with create_graph=True.

    Args:
        call: the call of the forward.
    """
    mean = None if given.mean is None else given.mean.contiguous()
    run = partial(ops.norm_bwd, given._replace(mean=mean, rstd=given.rstd.contiguous()), backend)
    # Without dropout, the gradients of input and residual both equal the gradient of the sum.
    dropped = call.options.dropout_p > 0.0
    of_sum = "residual" if call.residual is not None else None if dropped else "input"
    names = ("input" if dropped else None, of_sum, "weight", "bias")
    return differentiated(run, call, names, (given.grad_out, given.grad_total), reference.norm)


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
