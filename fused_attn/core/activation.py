"""dropout(activation(x)) in one pass forward and one backward, where a backend has a kernel for it.

torch takes three forward (activation, bits, product) and two backward, over the widest tensor of a
Transformer. Not an op of torch.library: what watches calls sees torch's, which compilers fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, reference
from fused_attn.backends.fields import DTYPES
from fused_attn.backends.registry import first_backend
from fused_attn.core import philox
from fused_attn.core.torch_state import PLAIN_TYPES, batched_by_autograd, plain_eager, unwatched


def dropped_relu(input: Tensor, dropout_p: float) -> Tensor | None:
    """dropout(relu(input)); None where torch has to compute it."""
    return _dropped(input, True, dropout_p)


def dropped(input: Tensor, dropout_p: float) -> Tensor | None:
    """dropout(input), likewise."""
    return _dropped(input, False, dropout_p)


def _dropped(input: Tensor, relu: bool, dropout_p: float) -> Tensor | None:
    if type(input) not in PLAIN_TYPES or not unwatched() or input.dtype not in DTYPES:
        return None
    if not (input.is_contiguous() and 0.0 < dropout_p < 1.0 and input.numel() > 0 and input.dim()):
        return None
    backend = first_backend(input.device)
    if backend is None or type(backend).dropped_activation is Backend.dropped_activation:
        return None
    seed = philox.new_seed(input.device)
    return _Dropped.apply(input, relu, dropout_p, seed, backend)


class _Dropped(Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, relu: bool, dropout_p: float, seed: Tensor, backend: Backend
    ) -> Tensor:
        matrix = input.reshape(-1, input.shape[-1])
        out = backend.dropped_activation(matrix, relu, dropout_p, seed)
        out = out.view(input.shape)  # type: ignore[union-attr]
        if relu:
            ctx.save_for_backward(out)  # positive where something is left
        ctx.relu, ctx.dropout_p, ctx.seed, ctx.backend = relu, dropout_p, seed, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        matrix = grad_out.resolve_neg().contiguous().view(-1, grad_out.shape[-1])
        (out,) = ctx.saved_tensors if ctx.relu else (matrix,)
        args = (out.view(matrix.shape), ctx.relu, ctx.dropout_p, ctx.seed, matrix)
        plain = plain_eager(grad_out) and not batched_by_autograd(grad_out)
        if torch.is_grad_enabled() or not plain:
            grad = reference.dropped_activation(*args)
        else:
            grad = ctx.backend.dropped_activation(*args)
        return grad.view(grad_out.shape), None, None, None, None
