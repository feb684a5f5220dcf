"""autograd.Functions around the ops.

First order runs on the kernels; the backward of a backward differentiates the reference in eager
math, with the same dropout mask. A call goes into `apply` whole, and its tensors beside it, where
autograd and torch.compile see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, reference
from fused_attn.core import ops
from fused_attn.core.call import AttentionCall, AttentionOutputs, NormCall
from fused_attn.core.flat import Flat
from fused_attn.core.layout import readable_in_place
from fused_attn.masks.spec import with_summaries


def attention(call: AttentionCall, backend: Backend) -> tuple[Tensor, Tensor]:
    """out and lse."""
    if backend.differentiable:
        return backend.attention_fwd(call, False)[:2]
    call = _readable(call, backend)
    if _needs_grad(call):
        return _Attention.apply(call, backend, *call.tensors())[:2]
    return ops.attention_fwd(call, backend, False)[:2]


def attention_with_weights(
    call: AttentionCall, average: bool, backend: Backend
) -> tuple[Tensor, Tensor]:
    """out, and the weights that made it."""
    if backend.differentiable:
        out, lse, lse_low = backend.attention_fwd(call, True)
        return out, backend.attention_weights(call, lse, lse_low, average)
    call = _readable(call, backend)
    needs_grad = _needs_grad(call)
    if needs_grad:
        out, lse, lse_low = _Attention.apply(call, backend, *call.tensors())
    else:
        out, lse, lse_low = ops.attention_fwd(call, backend, True)
    # The weights are a function of query, key and bias: that lse is known is no business of theirs.
    lse = lse.detach()
    if needs_grad:
        return out, _Weights.apply(call, lse, lse_low, average, backend, *call.tensors())
    return out, ops.attention_weights(call, lse, lse_low, average, backend)


def norm(call: NormCall, backend: Backend) -> tuple[Tensor, Tensor]:
    """out and residual + dropout(input)."""
    if backend.differentiable:
        out, total = backend.norm_fwd(call)[:2]
    elif _needs_grad(call):
        out, total = _Norm.apply(call, backend, *call.tensors())[:2]
    else:
        out, total = ops.norm_fwd(call, backend)[:2]
    return out, total if call.has_total else call.input


def _readable(call: AttentionCall, backend: Backend) -> AttentionCall:
    """The call as kernels read it."""
    call = call.readable()
    mask = with_summaries(call.mask, backend.tile_summary)
    return call if mask is call.mask else replace(call, mask=mask)


def _needs_grad(call: Flat) -> bool:
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in call.tensors()
    )


def _wanted(ctx: Any, name: str) -> bool:
    """True where the backward has to give a gradient of a tensor of the call, which came last."""
    tensors = ctx.call.TENSORS
    return ctx.needs_input_grad[tensors.index(name) - len(tensors)]


# forward takes ctx: with a setup_context of its own, apply would inspect signatures at every call,
# which takes longer than a small kernel. (No functorch transform comes here, see torch_state.)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, backend: Backend, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = ops.attention_fwd(call, backend, True)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs.lse_low)
        ctx.save_for_backward(*outputs, *tensors)
        ctx.call, ctx.backend = call.without_tensors(), backend
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        if grad_out is None and grad_lse is None:
            return (None, None, *ctx.call.by_tensor())
        out, lse, lse_low, *tensors = ctx.saved_tensors
        # Hooks on saved tensors may give back others than they took.
        call = ctx.call.with_tensors(tensors).readable()
        outputs = AttentionOutputs(readable_in_place(out), lse.contiguous(), lse_low.contiguous())
        given = torch.zeros_like(out) if grad_out is None else grad_out
        needs_bias = _wanted(ctx, "bias")

        def run() -> Any:
            return ops.attention_bwd(call, outputs, given, grad_lse, needs_bias, ctx.backend)

        grads = _differentiated(
            run, call, call.DIFFERENTIABLE, (given, grad_lse), reference.attention
        )
        by_name = dict(zip(call.DIFFERENTIABLE, grads, strict=True))
        if not needs_bias:
            del by_name["bias"]
        return (None, None, *call.by_tensor(**by_name))


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        lse: Tensor,
        lse_low: Tensor,
        average: bool,
        backend: Backend,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(lse, lse_low, *tensors)
        ctx.call, ctx.average, ctx.backend = call.without_tensors(), average, backend
        return ops.attention_weights(call, lse, lse_low, average, backend)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        lse, lse_low, *tensors = ctx.saved_tensors
        call, average = ctx.call.with_tensors(tensors).readable(), ctx.average
        needs_bias = _wanted(ctx, "bias")

        def run() -> Any:
            return ops.attention_weights_bwd(
                call, lse, lse_low, grad_weights, average, needs_bias, ctx.backend
            )

        def weights(call: AttentionCall) -> tuple[Tensor]:
            return (reference.attention_weights(call, average),)

        grads = _differentiated(run, call, ("query", "key", "bias"), (grad_weights,), weights)
        by_name = {"query": grads[0], "key": grads[1]}
        if needs_bias:
            by_name["bias"] = grads[2]
        return (None, None, None, None, None, *call.by_tensor(**by_name))


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, call: NormCall, backend: Backend, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = ops.norm_fwd(call, backend)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs.mean, outputs.rstd)
        # The kernel needs the sum alone, which is input where nothing was added; second order
        # differentiates the reference, which starts from input and residual.
        total = outputs.total if call.has_total else call.input
        ctx.save_for_backward(total, outputs.mean, outputs.rstd, *tensors)
        ctx.call, ctx.backend = call.without_tensors(), backend
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None, *_: Any) -> Any:
        total, mean, rstd, *tensors = ctx.saved_tensors
        mean, rstd = mean.contiguous(), rstd.contiguous()
        call = ctx.call.with_tensors(tensors)
        if not call.has_total:
            grad_total = None  # of the empty output; torch.compile hands zeros in
        if grad_out is None and grad_total is None:
            return (None, None, *call.by_tensor())
        given = torch.zeros_like(total) if grad_out is None else grad_out
        of_total = call.of_total(total)
        needs = _wanted(ctx, "weight"), _wanted(ctx, "bias")

        def run() -> Any:
            return ops.norm_bwd(of_total, mean, rstd, given, grad_total, *needs, ctx.backend)

        # Without dropout the gradient of input is that of the sum, and so is residual's.
        dropped = call.dropout_p > 0.0
        of_sum = "residual" if call.residual is not None else None if dropped else "input"
        names = ("input" if dropped else None, of_sum, "weight", "bias")
        grads = _differentiated(run, call, names, (given, grad_total), reference.norm)
        by_name = {"input": grads[0] if dropped else grads[1]}
        if call.residual is not None:
            by_name["residual"] = grads[1]
        if call.weight is not None and needs[0]:
            by_name["weight"] = grads[2].to(call.weight.dtype)
        if call.bias is not None and needs[1]:
            by_name["bias"] = grads[3].to(call.bias.dtype)
        return (None, None, *call.by_tensor(**by_name))


# ---- second order -------------------------------------------------------------------------------

Names = tuple[str | None, ...]
Reference = Callable[[Any], Sequence[Tensor]]


def _differentiated(
    run: Callable[[], tuple[Tensor, ...]],
    call: Flat,
    names: Names,
    grad_outputs: tuple[Tensor | None, ...],
    function: Reference,
) -> tuple[Tensor, ...]:
    """run(), which can itself be differentiated where the backward runs with create_graph=True.

    Args:
        run: computes gradients of function(call) under grad_outputs, by the kernels.
        names: the tensor of the call that each gradient is of; None for one that is not to be.
        grad_outputs: one for each output of function, None where there is none.
        function: the same as a differentiable function of the call.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return run()
    what = (run, call.without_tensors(), names, len(grad_outputs), function)
    return _Backward.apply(*what, *grad_outputs, *call.tensors())


class _Backward(Function):
    """A backward pass by the kernels, whose own backward differentiates the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], tuple[Tensor, ...]],
        call: Flat,
        names: Names,
        num_outputs: int,
        function: Reference,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.what = (call, names, num_outputs, function)
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor | None) -> Any:
        call, names, num_outputs, function = ctx.what
        grad_outputs = ctx.saved_tensors[:num_outputs]
        tensors = list(ctx.saved_tensors[num_outputs:])
        indices = [call.TENSORS.index(name) for name in call.DIFFERENTIABLE]
        of_name = {n: g for n, g in zip(names, grad_grads, strict=True) if n is not None}

        def run(*inputs: Tensor | None) -> Sequence[Tensor]:
            for index, tensor in zip(indices, inputs, strict=True):
                tensors[index] = tensor
            return function(call.with_tensors(tensors))

        for_inputs, for_outputs = _second_order(
            run,
            [tensors[index] for index in indices],
            grad_outputs,
            [of_name.get(name) for name in call.DIFFERENTIABLE],
        )
        by_name = dict(zip(call.DIFFERENTIABLE, for_inputs, strict=True))
        return (None,) * 5 + (*for_outputs, *call.by_tensor(**by_name))


def _second_order(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
    grad_grads: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of (gradients of run(*inputs) under grad_outputs), weighted by grad_grads.

    Args:
        run: differentiable function of `inputs`, with as many outputs as `grad_outputs`.
        inputs: what it was differentiated by; None stays out.
        grad_outputs: None where there was none.
        grad_grads: one for each of inputs, None where there is none.

    Returns:
        Gradients for inputs and for grad_outputs.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(_device_type(inputs), enabled=False):
        inputs = [_tracked(t) for t in inputs]
        grad_outputs = [_tracked(t) for t in grad_outputs]
        there = [i for i, t in enumerate(inputs) if t is not None]
        known = [t for t in inputs if t is not None]
        outputs = run(*inputs)
        pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None]
        first = torch.autograd.grad(
            [o for o, _ in pairs],
            known,
            [g for _, g in pairs],
            create_graph=True,
            allow_unused=True,
        )
        weighted = [
            (f, grad)
            for i, f in zip(there, first, strict=True)
            if f is not None and (grad := grad_grads[i]) is not None and f.requires_grad
        ]
        sources = known + [g for _, g in pairs]
        second: Any = (None,) * len(sources)
        if weighted:
            second = torch.autograd.grad(
                [f for f, _ in weighted],
                sources,
                [g.to(f.dtype) for f, g in weighted],
                create_graph=create_graph,
                allow_unused=True,
            )
    for_inputs: list[Tensor | None] = [None] * len(inputs)
    for i, grad in zip(there, second[: len(there)], strict=True):
        for_inputs[i] = grad
    rest = iter(second[len(there) :])
    for_outputs = [None if g is None else next(rest) for g in grad_outputs]
    return for_inputs, for_outputs


def _tracked(tensor: Tensor | None) -> Tensor | None:
    """A tensor that gradients can be taken by; the graph above it stays attached.

    It is an alias: grad_out may depend on query through that graph, and a gradient by query itself
    would follow it there.
    """
    if tensor is None:
        return None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _device_type(tensors: Sequence[Tensor | None]) -> str:
    return next(t.device.type for t in tensors if t is not None)
