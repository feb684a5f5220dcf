"""Fused dropout(activation(x + bias)), in one pass over memory each in forward and backward.

The input is the widest tensor of a Transformer. torch's operations read or write it in four passes
in the forward (copy of the bias before the matmul, activation, random bits, multiplication) and in
two or three passes in the backward.

`activation_pass` is not registered in torch.library. Intercepted calls use torch's operations,
which compilers can fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, reference
from fused_attn.backends.fields import DTYPES
from fused_attn.backends.registry import default_with
from fused_attn.base import philox
from fused_attn.base.torch_state import (
    PLAIN_TYPES,
    is_intercepted,
    plain_eager,
)


def activation_backend(input: Tensor) -> Backend | None:
    """Return the backend of `activation_pass` for a tensor or a linear projection of it.

    Returns None if torch's operations must be used.
    """
    if type(input) not in PLAIN_TYPES or is_intercepted():
        return None
    return default_with("activation", input.device)


def activation_pass(
    input: Tensor,
    bias: Tensor | None,
    activation: str,
    dropout_p: float = 0.0,
    *,
    backend: Backend | None = None,
    overwrite: bool = False,
) -> Tensor | None:
    """Compute dropout(activation(input + bias)), or return None if no backend supports the call.

    Args:
        input: (*, columns), contiguous.
        bias: (columns,) or None; cast to the dtype of input. input + bias is not rounded to this
            dtype.
        activation: one of `backends.base.ACTIVATIONS`.
        dropout_p: probability of dropping an element, in [0, 1).
        backend: the result of `activation_backend`, if the caller knows it.
        overwrite: allow the result to overwrite input. Ignored if a gradient is needed.
    """
    backend = backend or activation_backend(input)
    if backend is None or type(input) not in PLAIN_TYPES:
        return None
    if input.dtype not in DTYPES or not 0.0 <= dropout_p < 1.0:
        return None
    if not (input.dim() and input.numel() > 0 and input.is_contiguous()) or input.is_neg():
        return None
    if bias is not None:
        bias = bias.to(input.dtype)
        if type(bias) not in PLAIN_TYPES or not bias.is_contiguous():
            return None
    seed = philox.new_seed(input.device) if dropout_p > 0.0 else None
    needs_grad = input.requires_grad or (bias is not None and bias.requires_grad)
    call = activation, dropout_p, seed
    if torch.is_grad_enabled() and needs_grad:
        return _Activation.apply(input, bias, call, backend)
    return backend.activation(input, bias, *call, out=input if overwrite else None)


class _Activation(Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        call: tuple[str, float, Tensor | None],
        backend: Backend,
    ) -> Tensor:
        # Do not return a view: autograd forbids in-place operations on views from a Function.
        out = backend.activation(input, bias, *call)
        activation = call[0]
        if activation == "relu":
            ctx.save_for_backward(out, None)  # the gradient passes where out > 0
        elif activation != "identity":
            ctx.save_for_backward(input, bias)
        ctx.call, ctx.backend = call, backend
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = grad_out.resolve_neg().contiguous()
        # Saved-tensor hooks may have changed the dtype or layout of the tensors.
        input, bias = (_as_given(t, grad_out) for t in ctx.saved_tensors or (grad_out, None))
        args = (input, bias, *ctx.call, grad_out)
        plain = plain_eager(grad_out, input)
        differentiably = torch.is_grad_enabled() or not plain
        grad = (reference if differentiably else ctx.backend).activation(*args)
        columns = grad.shape[-1]
        grad_bias = grad.reshape(-1, columns).sum(0) if ctx.needs_input_grad[1] else None
        return grad, grad_bias, None, None


def _as_given(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype).contiguous()
