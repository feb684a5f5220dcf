"""Second-order and higher gradients, computed by differentiating the reference.

The reference computes the same dropout mask as the kernels from the seed of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.base.flat import Flat
from fused_attn.base.torch_state import batched, is_compiling

Names = tuple[str | None, ...]
Reference = Callable[[Any], Sequence[Tensor]]


def with_second_order(
    run: Callable[[], tuple[Tensor, ...]],
    call: Flat,
    names: Names,
    grad_outputs: tuple[Tensor | None, ...],
    function: Reference,
) -> tuple[Any, ...]:
    """Return run(). With create_graph=True, its results can be differentiated again.

    Args:
        run: computes the gradients of function(call) for grad_outputs with kernels.
        call: the call of the forward.
        names: for each result of run, the name of the call's tensor whose gradient it is; None for
            a result to ignore.
        grad_outputs: gradient of each output of function, or None.
        function: the reference of the forward, a differentiable function of the call.
    """
    if not torch.is_grad_enabled() or is_compiling():
        return run()
    if batched(*grad_outputs):
        # A Function cannot extend the graph of a batched tensor, which belongs to the tensor that
        # it wraps. Differentiate the reference directly.
        of_inputs, inputs = _of_tensors(call, function)
        with torch.autocast(_device_type(inputs), enabled=False):
            grads = _first_order(of_inputs, [_alias(t) for t in inputs], grad_outputs)
        by_name = dict(zip(call.DIFFERENTIABLE, grads, strict=True))
        return tuple([None if name is None else by_name[name] for name in names])
    args = (run, call.with_tensors(()), names, len(grad_outputs), function)
    return _Backward.apply(*args, *grad_outputs, *call.tensors())


class _Backward(Function):
    """Autograd Function of a backward. `backward` differentiates the reference implementation."""

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
        ctx.args = (call, names, num_outputs, function)
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor | None) -> Any:
        call, names, num_outputs, function = ctx.args
        grad_outputs = ctx.saved_tensors[:num_outputs]
        call = call.with_tensors(ctx.saved_tensors[num_outputs:])
        of_name = {n: g for n, g in zip(names, grad_grads, strict=True) if n is not None}
        for_inputs, for_outputs = _second_order(
            *_of_tensors(call, function),
            grad_outputs,
            [of_name.get(name) for name in call.DIFFERENTIABLE],
        )
        by_name = dict(zip(call.DIFFERENTIABLE, for_inputs, strict=True))
        return (None,) * 5 + (*for_outputs, *call.by_tensor(**by_name))


def _of_tensors(
    call: Flat, function: Reference
) -> tuple[Callable[..., Sequence[Tensor]], list[Tensor | None]]:
    """Return `function` as a function of the call's differentiable tensors, and these tensors."""
    tensors = list(call.tensors())
    indices = [call.TENSORS.index(name) for name in call.DIFFERENTIABLE]

    def run(*inputs: Tensor | None) -> Sequence[Tensor]:
        for index, tensor in zip(indices, inputs, strict=True):
            tensors[index] = tensor
        return function(call.with_tensors(tensors))

    return run, [tensors[index] for index in indices]


def _first_order(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return differentiable gradients of run(*inputs) for inputs, all of which must require grad.

    A gradient is None if its input is None or run does not use it.
    """
    pairs = [(o, g) for o, g in zip(run(*inputs), grad_outputs, strict=True) if g is not None]
    grads = iter(
        torch.autograd.grad(
            [o for o, _ in pairs],
            [t for t in inputs if t is not None],
            [g for _, g in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [None if t is None else next(grads) for t in inputs]


def _second_order(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
    grad_grads: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the vector-Jacobian product of `_first_order` with grad_grads.

    The results are the gradients with respect to inputs and those with respect to grad_outputs.
    Inputs need not require grad.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(_device_type(inputs), enabled=False):
        inputs = [_alias(t) for t in inputs]
        grad_outputs = [_alias(t) for t in grad_outputs]
        first = _first_order(run, inputs, grad_outputs)
        weighted = [
            (f, grad.to(f.dtype))
            for f, grad in zip(first, grad_grads, strict=True)
            if f is not None and grad is not None and f.requires_grad
        ]
        sources = [t for t in (*inputs, *grad_outputs) if t is not None]
        second: Any = (None,) * len(sources)
        if weighted:
            second = torch.autograd.grad(
                [f for f, _ in weighted],
                sources,
                [g for _, g in weighted],
                create_graph=create_graph,
                allow_unused=True,
            )
    grads = iter(second)
    for_inputs = [None if t is None else next(grads) for t in inputs]
    return for_inputs, [None if t is None else next(grads) for t in grad_outputs]


def _alias(tensor: Tensor | None) -> Tensor | None:
    """Return an alias of the tensor, as a variable to differentiate with respect to.

    The alias is attached to the graph of the tensor. grad_out may depend on query through this
    graph. A gradient with respect to query itself would include that path, and a gradient with
    respect to its alias does not.
    """
    if tensor is None:
        return None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _device_type(tensors: Sequence[Tensor | None]) -> str:
    return next(t.device.type for t in tensors if t is not None)
