"""Tensors that autograd.Functions of a call receive, save and rebuild."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.flat import Flat, FlatT
from fused_attn.base.torch_state import batched, plain_eager
from fused_attn.call.unchecked import UncheckedAttention, UncheckedNorm


def without_aliases(call: FlatT) -> FlatT:
    """Return the call with views of repeated tensors, which torch.compile rejects in a Function."""
    tensors: list[Tensor | None] = []
    for tensor in call.tensors():
        if tensor is not None and any(tensor is other for other in tensors):
            tensor = tensor.view_as(tensor)
        tensors.append(tensor)
    return call.with_tensors(tensors)


def leading_tensors(call: Flat | UncheckedAttention | UncheckedNorm) -> tuple[Tensor | None, ...]:
    """Return the call's tensors without trailing Nones, as each argument of `apply` takes time."""
    tensors = call.tensors()
    count = len(tensors)
    while tensors[count - 1] is None:
        count -= 1
    return tensors[:count]


def rebuilt(call: FlatT, present: Sequence[Tensor | None]) -> FlatT:
    """Return a copy of the call with `present` as its first tensors and None for the others."""
    return call.with_tensors([*present, *(None,) * (len(call.TENSORS) - len(present))])


def runs_kernels(grad: Tensor | None, other: Tensor | None) -> bool:
    """Return True if a backward may call kernels directly: eager, first-order and unbatched."""
    return not torch.is_grad_enabled() and plain_eager(grad, other) and not batched(grad, other)


def needs_input_grad(ctx: Any, index: int) -> bool:
    """Return True if autograd needs the gradient of tensor `index` of the call's TENSORS."""
    index += ctx.first
    return index < len(ctx.needs_input_grad) and ctx.needs_input_grad[index]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]


def saved(ctx: Any) -> list[Any]:
    """Return the stored tensors, cast back if a saved-tensor hook changed their dtype."""
    pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t, dtype in pairs]
