"""Tensors that autograd.Functions of a call receive, save and rebuild."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.flat import FlatT
from fused_attn.base.torch_state import is_compiling, plain_eager


def tracked(call: FlatT) -> tuple[FlatT, Sequence[Tensor | None]]:
    """Return a call and its tensors as arguments for the `apply` of a Function.

    Trailing Nones are left out, as each argument takes time. Under torch.compile, which rejects the
    same tensor twice, repeated tensors are replaced by views.
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


def runs_kernels(grad: Tensor | None, other: Tensor | None) -> bool:
    """Return True if a backward may call kernels directly: eager, first-order and unbatched."""
    return not torch.is_grad_enabled() and plain_eager(grad, other)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]


def saved(ctx: Any) -> list[Any]:
    """Return the stored tensors, cast back if a saved-tensor hook changed their dtype."""
    pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t, dtype in pairs]
