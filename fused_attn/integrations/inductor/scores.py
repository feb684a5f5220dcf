"""`attention_of_steps`, the function that the Inductor pass inserts in place of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fused_attn import functional
from fused_attn.base.torch_state import statistics_dtype

# One operation on the scores: its kind, followed by its operands.
#   ("multiply", factor)         a number, or a tensor that is constant along the keys
#   ("divide", factor)           a tensor that is constant along the keys
#   ("add", bias), ("subtract", bias)  a tensor
#   ("fill", hidden, value)      replaces scores by a number where the bool tensor is True
#   ("keep", visible, value)     replaces scores by a number where the bool tensor is False
#   ("tanh",)                    part of softcap * tanh(scores / softcap)
#   ("reshape", method, args)    a Tensor method that changes the dimensions of the scores
Step = tuple[Any, ...]


# Conversion of an operand to the required dimensions: a permutation, followed by the positions at
# which to insert dimensions of size 1, in this order.
Arrangement = tuple[tuple[int, ...], tuple[int, ...]]


def attention_of_steps(
    operands: Sequence[Tensor],
    arrangements: Sequence[Arrangement | None],
    steps: Sequence[Step],
    dropout_p: float,
    order: Sequence[int] | None,
    contiguous: bool,
) -> Tensor:
    """Compute softmax(steps(query @ key^T)) @ value with the fused kernels.

    Args:
        operands: query, key and value.
        arrangements: conversions of the operands to (*batch, seqlen_q, head_dim), (*batch,
            seqlen_k, head_dim) and (*others, seqlen_k, head_dim_v); None for no conversion. The
            batch dimensions of query and key broadcast. `others` are the batch dimensions of the
            scores after the last step.
        steps: operations on the scores, in order.
        dropout_p: dropout probability of the weights.
        order: permutation of the result, or None.
        contiguous: return a contiguous tensor, as a matmul does.

    Returns:
        The output, (*others, seqlen_q, head_dim_v), permuted by `order`. Rows fully masked by -inf
        are 0. Rows fully masked by finite fills have the result of eager attention. They contribute
        no gradient to query and key, because constants replaced their scores.
    """
    pairs = zip(operands, arrangements, strict=True)
    query, key, value = (_arranged(operand, how) for operand, how in pairs)
    scores = _Scores(query, key)
    for kind, *values in steps:
        getattr(scores, kind)(*values)
    query, mask = scores.query_and_mask()
    batch, others = scores.shape[:-2], scores.template.shape[:-2]
    if value.dim() > 2 and batch != others:
        value = value.expand(*others, -1, -1).reshape(*batch, *value.shape[-2:])
    out = functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, scale=scores.scale, softcap=scores.softcap
    )
    out = cast(Tensor, out)
    out = out if batch == others else out.reshape(*others, *out.shape[-2:])
    out = out if order is None else out.permute(*order)
    return out.contiguous() if contiguous else out


def _arranged(operand: Tensor, how: Arrangement | None) -> Tensor:
    if how is None:
        return operand
    permutation, added = how
    operand = operand.permute(permutation)
    for dim in added:
        operand = operand.unsqueeze(dim)
    return operand


class _Scores:
    """Scores after the steps applied so far, expressed as arguments of the fused function.

    Attributes:
        shape: shape of query @ key^T.
        template: one element, expanded to the shape of the scores after the last step.
        scale: factor of query @ key^T.
        softcap: softcap argument of the fused function, or None.
        bias: tensor added to the scaled and capped scores, or None.
        hidden: bool tensor, True for scores masked by -inf, or None.
        replaced: bool tensor, True for scores replaced by a number or by -inf, or None.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        self.query = query
        self.shape = torch.Size((*batch, query.shape[-2], key.shape[-2]))
        self.template = query.new_empty(()).expand(self.shape)
        self.scale, self.softcap = 1.0, cast("float | None", None)
        self.bias: Tensor | None = None
        self.hidden: Tensor | None = None
        self.replaced: Tensor | None = None
        self._finite = False  # True if some scores were replaced by a number other than -inf

    def multiply(self, factor: float | Tensor) -> None:
        if isinstance(factor, Tensor):
            factor = self._in_shape(factor)
            self.query = self.query * factor.to(self.query.dtype)
        elif isinstance(factor, torch.SymFloat):  # a number known only at run time
            self.query = self.query * factor
        else:
            self.scale *= factor
            if self.softcap is not None:
                self.softcap *= factor
        if self.bias is not None:
            self.bias = self.bias * factor

    def divide(self, factor: Tensor) -> None:
        self.multiply(1.0 / factor)

    def tanh(self) -> None:
        self.softcap = 1.0

    def add(self, bias: Tensor) -> None:
        bias = self._in_shape(bias)
        if bias.dtype not in (torch.float32, self.query.dtype):
            bias = bias.to(statistics_dtype(self.query.dtype))
        self.bias = bias if self.bias is None else self.bias + bias

    def subtract(self, bias: Tensor) -> None:
        if not bias.is_floating_point():  # the negative of an unsigned integer wraps
            bias = bias.to(statistics_dtype(self.query.dtype))
        self.add(-bias)

    def fill(self, hidden: Tensor, value: float) -> None:
        hidden = self._in_shape(hidden)
        self.replaced = hidden if self.replaced is None else self.replaced | hidden
        if value == -math.inf:
            self.hidden = hidden if self.hidden is None else self.hidden | hidden
            return
        self._finite = True
        bias = self.query.new_zeros(()) if self.bias is None else self.bias
        self.bias = torch.where(hidden, value, bias.to(statistics_dtype(bias.dtype)))

    def keep(self, visible: Tensor, value: float) -> None:
        self.fill(visible.logical_not(), value)

    def reshape(self, method: str, args: Sequence[Any]) -> None:
        self.template = getattr(self.template, method)(*args)

    def query_and_mask(self) -> tuple[Tensor, Tensor | None]:
        """Return the query and the mask for the fused function."""
        query = self.query
        if self._finite and self.replaced is not None:
            # Zero the query in rows whose scores were all replaced, so that no gradient flows.
            query = query.masked_fill(self.replaced.all(-1, keepdim=True), 0.0)
        if self.hidden is None:
            return query, self.bias
        if self.bias is None:
            return query, self.hidden.logical_not()
        return query, self.bias.masked_fill(self.hidden, -math.inf)

    def _in_shape(self, tensor: Tensor) -> Tensor:
        """Reshape a tensor that broadcasts to the template so that it broadcasts to `shape`."""
        to, shape = self.template.shape, self.shape
        if to == shape:
            return tensor
        tensor = tensor.reshape((1,) * (len(to) - tensor.dim()) + tuple(tensor.shape))
        same = 2 if to[-2:] == shape[-2:] else 0  # number of last dimensions to leave as is
        rest = tensor.shape[len(to) - same :]
        tensor = tensor.expand(*to[: len(to) - same], *rest)
        tensor = tensor.reshape(*shape[: len(shape) - same], *rest)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # repeated by `expand`
                tensor = tensor.narrow(dim, 0, 1)
        return tensor
