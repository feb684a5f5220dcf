"""autograd.Function classes around the ops.

The backward of each is itself a Function, whose backward differentiates the reference: first
order runs on the kernels, higher orders on eager math with the same dropout mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import get_backend, reference
from fused_attn.core import ops
from fused_attn.core.layout import readable_in_place
from fused_attn.masks.spec import NUM_SPEC_FIELDS, NUM_SPEC_INTEGERS, MaskSpec, with_summaries

_NUM_SCALARS = NUM_SPEC_INTEGERS + 3  # and scale, softcap, dropout_p


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out, lse by the kernels of a backend; see `reference.attention`."""
    query, key, value = (readable_in_place(t) for t in (query, key, value))
    spec = with_summaries(spec, get_backend(backend).tile_summary)
    args = (query, key, value, *spec.flat(), scale, softcap, dropout_p, seed, backend)
    if not _needs_grad(query, key, value, spec.bias):
        return ops.attention_fwd(*args, False)[:2]
    return _Attention.apply(*args)[:2]


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    average: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out, and the weights that made it; see `reference.attention_weights`."""
    query, key, value = (readable_in_place(t) for t in (query, key, value))
    spec = with_summaries(spec, get_backend(backend).tile_summary)
    options = (*spec.flat(), scale, softcap, dropout_p, seed)
    args = (query, key, value, *options, backend)
    if _needs_grad(query, key, value, spec.bias):
        out, lse, lse_low = _Attention.apply(*args)
    else:
        out, lse, lse_low = ops.attention_fwd(*args, True)
    # The weights are a function of query, key and bias: that lse is known is no business of theirs.
    weights = _Weights.apply if _needs_grad(query, key, spec.bias) else ops.attention_weights
    return out, weights(query, key, lse.detach(), lse_low, *options, average, backend)


def norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dropout_p: float,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out and residual + dropout(input) by the kernels of a backend; see `reference.norm`."""
    args = (input, residual, weight, bias, eps, rms, dropout_p, seed, backend)
    if _needs_grad(input, residual, weight, bias):
        out, total, _, _ = _Norm.apply(*args)
    else:
        out, total, _, _ = ops.norm_fwd(*args)
    has_total = residual is not None or dropout_p > 0.0
    return out, total if has_total else input


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# forward takes ctx: with a setup_context of its own, apply would inspect signatures at every call,
# which takes longer than a small kernel. (No functorch transform comes here, see _modes.)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = ops.attention_fwd(*inputs, True)
        query, key, value, *options, seed, backend = inputs
        tensors, scalars = options[:-_NUM_SCALARS], options[-_NUM_SCALARS:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(query, key, value, *output, seed, *tensors)
        ctx.scalars, ctx.backend = scalars, backend
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        query, key, value, out, lse, lse_low, seed, *tensors = ctx.saved_tensors
        nothing = (None,) * (len(tensors) - 1 + len(ctx.scalars) + 2)
        if grad_out is None and grad_lse is None:
            return (None, None, None, None, *nothing)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needs_bias = ctx.needs_input_grad[3]
        args = (
            grad_out, grad_lse, query, key, value, out, lse, lse_low, *tensors, *ctx.scalars, seed,
            needs_bias, ctx.backend,
        )  # fmt: skip
        grads = _run_backward(_AttentionBackward, ops.attention_bwd, args)
        return (*grads[:3], grads[3] if needs_bias else None, *nothing)


class _AttentionBackward(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        grad_out, grad_lse, query, key, value, _, _, _, *options, seed, _, _ = inputs
        tensors, scalars = options[:-_NUM_SCALARS], options[-_NUM_SCALARS:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_out, grad_lse, query, key, value, seed, *tensors)
        ctx.scalars = scalars
        return ops.attention_bwd(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor | None) -> Any:
        grad_out, grad_lse, query, key, value, seed, bias, *tensors = ctx.saved_tensors
        *integers, scale, softcap, dropout_p = ctx.scalars

        def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Any:
            spec = MaskSpec(bias, *tensors, *integers)
            assert len(spec.flat()) == NUM_SPEC_FIELDS
            return reference.attention(query, key, value, spec, scale, softcap, dropout_p, seed)

        grads = _second_order(run, (query, key, value, bias), (grad_out, grad_lse), grad_grads)
        (grad_query, grad_key, grad_value, grad_bias), (grad_grad_out, grad_grad_lse) = grads
        nothing = (None,) * (len(tensors) + len(ctx.scalars) + 3)
        return (
            grad_grad_out, grad_grad_lse, grad_query, grad_key, grad_value, None, None, None,
            grad_bias, *nothing,
        )  # fmt: skip


class _Weights(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, lse, lse_low, *options, seed, average, backend = inputs
        tensors, scalars = options[:-_NUM_SCALARS], options[-_NUM_SCALARS:]
        ctx.save_for_backward(query, key, lse, lse_low, seed, *tensors)
        ctx.scalars, ctx.average, ctx.backend = scalars, average, backend
        return ops.attention_weights(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        query, key, lse, lse_low, seed, *tensors = ctx.saved_tensors
        needs_bias = ctx.needs_input_grad[4]
        args = (
            grad_weights, query, key, lse, lse_low, *tensors, *ctx.scalars, seed, ctx.average,
            needs_bias, ctx.backend,
        )  # fmt: skip
        grads = _run_backward(_WeightsBackward, ops.attention_weights_bwd, args)
        nothing = (None,) * (len(tensors) - 1 + len(ctx.scalars) + 3)
        return (*grads[:2], None, None, grads[2] if needs_bias else None, *nothing)


class _WeightsBackward(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        grad_weights, query, key, _, _, *options, seed, average, _, _ = inputs
        tensors, scalars = options[:-_NUM_SCALARS], options[-_NUM_SCALARS:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_weights, query, key, seed, *tensors)
        ctx.scalars, ctx.average = scalars, average
        return ops.attention_weights_bwd(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor | None) -> Any:
        grad_weights, query, key, seed, bias, *tensors = ctx.saved_tensors
        *integers, scale, softcap, dropout_p = ctx.scalars

        def run(query: Tensor, key: Tensor, bias: Tensor | None) -> Any:
            spec = MaskSpec(bias, *tensors, *integers)
            options = (scale, softcap, dropout_p, seed, ctx.average)
            return (reference.attention_weights(query, key, spec, *options),)

        grads = _second_order(run, (query, key, bias), (grad_weights,), grad_grads)
        (grad_query, grad_key, grad_bias), (grad_grad,) = grads
        nothing = (None,) * (len(tensors) + len(ctx.scalars) + 4)
        return (grad_grad, grad_query, grad_key, None, None, grad_bias, *nothing)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = ops.norm_fwd(*inputs)
        input, residual, weight, bias, eps, rms, dropout_p, seed, backend = inputs
        _, total, mean, rstd = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        # Second order differentiates the reference, which starts from input and residual; the
        # kernel needs the sum alone, which is input where nothing was added.
        has_total = residual is not None or dropout_p > 0.0
        ctx.save_for_backward(
            total if has_total else input, input, residual, weight, bias, mean, rstd, seed
        )
        ctx.options = (eps, rms, dropout_p, backend)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None, *_: Any) -> Any:
        total, input, residual, weight, bias, mean, rstd, seed = ctx.saved_tensors
        eps, rms, dropout_p, backend = ctx.options
        nothing = (None,) * 5
        if residual is None and dropout_p == 0.0:
            grad_total = None  # of the empty output; torch.compile hands zeros in
        if grad_out is None and grad_total is None:
            return (None, None, None, None, *nothing)
        if grad_out is None:
            grad_out = torch.zeros_like(total)
        args = (
            grad_out, grad_total, total, weight, mean, rstd, rms, dropout_p, seed,
            ctx.needs_input_grad[2], ctx.needs_input_grad[3], backend,
        )  # fmt: skip
        if _records():
            grads = _NormBackward.apply(*args, input, residual, bias, eps)
        else:
            grads = ops.norm_bwd(*args)
        grad_input, grad_residual, grad_weight, grad_bias = grads
        return (
            grad_input if dropout_p > 0.0 else grad_residual,
            None if residual is None else grad_residual,
            _like(grad_weight, weight) if ctx.needs_input_grad[2] else None,
            _like(grad_bias, bias) if ctx.needs_input_grad[3] else None,
            *nothing,
        )


class _NormBackward(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        grad_out, grad_total, _, weight, _, _, rms, dropout_p, seed, *_ = inputs
        input, residual, bias, eps = inputs[12:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_out, grad_total, input, residual, weight, bias, seed)
        ctx.options = (eps, rms, dropout_p)
        return ops.norm_bwd(*inputs[:12])

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor | None) -> Any:
        grad_out, grad_total, input, residual, weight, bias, seed = ctx.saved_tensors

        def run(
            input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
        ) -> Any:
            eps, rms, dropout_p = ctx.options
            return reference.norm(input, residual, weight, bias, eps, rms, dropout_p, seed)

        order = list(grad_grads)
        if ctx.options[2] == 0.0:  # the gradient of input is residual's, and came as that
            order[0], order[1] = (order[1], None) if residual is None else (None, order[1])
        grads = _second_order(run, (input, residual, weight, bias), (grad_out, grad_total), order)
        (grad_input, grad_residual, grad_weight, grad_bias), (grad_grad_out, grad_grad_total) = (
            grads
        )
        return (
            grad_grad_out, grad_grad_total, None, grad_weight, *(None,) * 8,
            grad_input, grad_residual, grad_bias, None,
        )  # fmt: skip


def _like(grad: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else grad.to(parameter.dtype)


def _records() -> bool:
    """backward runs with create_graph=True."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _run_backward(function: Any, op: Any, args: tuple[Any, ...]) -> Any:
    return function.apply(*args) if _records() else op(*args)


def _second_order(
    run: Any,
    inputs: tuple[Tensor | None, ...],
    grad_outputs: tuple[Tensor | None, ...],
    grad_grads: Any,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of (gradients of run(*inputs) under grad_outputs), weighted by grad_grads.

    Args:
        run: differentiable function of `inputs`, with as many outputs as `grad_outputs`.
        inputs: what it was differentiated by; None and integers stay out.
        grad_outputs: None where there was none.
        grad_grads: one for each of inputs, None where there is none.

    Returns:
        Gradients for inputs and for grad_outputs.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(_device_type(inputs), enabled=False):
        inputs = tuple(_tracked(t) for t in inputs)
        grad_outputs = tuple(_tracked(t) for t in grad_outputs)
        kept = [i for i, t in enumerate(inputs) if t is not None]
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
            (f, grad_grads[i])
            for i, f in zip(kept, first, strict=True)
            if f is not None and grad_grads[i] is not None and f.requires_grad
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
    for i, grad in zip(kept, second[: len(kept)], strict=True):
        for_inputs[i] = grad
    rest = iter(second[len(kept) :])
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


def _device_type(tensors: tuple[Tensor | None, ...]) -> str:
    return next(t.device.type for t in tensors if t is not None)
