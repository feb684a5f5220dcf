"""dropout(activation(x + bias)) in one pass forward and one backward, where a backend has a kernel.

torch takes four forward (the copy of the bias under a product, activation, bits, product) and two
or three backward, over the widest tensor of a Transformer. Not an op of torch.library: what
watches calls sees torch's, which compilers fuse.
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


def takes_activation(input: Tensor) -> bool:
    """Whether `activation_pass` may compute what is made of such a tensor by a product."""
    return _backend_of(input) is not None


def activation_pass(
    input: Tensor,
    bias: Tensor | None,
    activation: str,
    dropout_p: float = 0.0,
    *,
    overwrite: bool = False,
) -> Tensor | None:
    """dropout(activation(input + bias)); None where torch has to compute it.

    Args:
        input: (*, columns).
        bias: (columns,); in the type of input it is added unrounded.
        activation: one of `backends.base.ACTIVATIONS`.
        overwrite: input is nobody else's: the result may be written over it.
    """
    backend = _backend_of(input)
    if backend is None or input.dtype not in DTYPES or not 0.0 <= dropout_p < 1.0:
        return None
    if not (input.dim() and input.numel() > 0 and input.is_contiguous()):
        return None
    if bias is not None:
        bias = bias.to(input.dtype)
        if type(bias) not in PLAIN_TYPES or not bias.is_contiguous():
            return None
    seed = philox.new_seed(input.device) if dropout_p > 0.0 else None
    needs_grad = input.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and needs_grad:
        return _Activation.apply(input, bias, activation, dropout_p, seed, backend)
    return _forward(input, bias, activation, dropout_p, seed, backend, overwrite)


def _backend_of(input: Tensor) -> Backend | None:
    if type(input) not in PLAIN_TYPES or not unwatched():
        return None
    backend = first_backend(input.device)
    if backend is None or type(backend).activation is Backend.activation:
        return None
    return backend


def _forward(
    input: Tensor,
    bias: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    backend: Backend,
    overwrite: bool,
) -> Tensor:
    matrix = input.view(-1, input.shape[-1])
    out = matrix if overwrite else None
    return backend.activation(matrix, bias, activation, dropout_p, seed, out=out).view(input.shape)


class _Activation(Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        activation: str,
        dropout_p: float,
        seed: Tensor | None,
        backend: Backend,
    ) -> Tensor:
        out = _forward(input, bias, activation, dropout_p, seed, backend, False)
        if activation == "relu":
            ctx.save_for_backward(out, None)  # positive where something is left
        elif activation != "identity":
            ctx.save_for_backward(input, bias)
        ctx.call = activation, dropout_p, seed
        ctx.backend = backend
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows = grad_out.resolve_neg().contiguous().view(-1, grad_out.shape[-1])
        input, bias = ctx.saved_tensors or (grad_rows, None)
        args = (input.view(grad_rows.shape), bias, *ctx.call, grad_rows)
        plain = plain_eager(grad_out) and not batched_by_autograd(grad_out)
        differentiably = torch.is_grad_enabled() or not plain
        grad = (reference if differentiably else ctx.backend).activation(*args)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        return grad.view(grad_out.shape), grad_bias, None, None, None, None
