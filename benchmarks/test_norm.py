"""Norms against torch's, and against its composition of dropout, sum and norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from shapes import NORMS

import fused_attn

DTYPES = [torch.float32, torch.bfloat16]


def tensors(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = (
        torch.randn(shape.rows, shape.columns, generator=generator).to(dtype) for _ in range(2)
    )
    weight, bias = torch.ones(shape.columns, dtype=dtype), torch.zeros(shape.columns, dtype=dtype)
    return x, residual if shape.residual else None, weight, bias


def own(shape, x, residual, weight, bias):
    return fused_attn.layer_norm(
        x, shape.columns, weight, bias, residual=residual, dropout_p=shape.dropout_p
    )


def peer(shape, x, residual, weight, bias):
    if residual is not None:
        x = residual + F.dropout(x, shape.dropout_p)
    return F.layer_norm(x, (shape.columns,), weight, bias)


def checked(shape, operands):
    if shape.dropout_p == 0:
        truth = peer(shape, *(None if t is None else t.double() for t in operands))
        eager = (peer(shape, *operands).double() - truth).abs().max()
        got = (own(shape, *operands).double() - truth).abs().max()
        rounding = truth.abs().max() * torch.finfo(operands[0].dtype).eps
        assert got <= 2 * eager + rounding, f"{shape.name} is wrong"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", NORMS, ids=lambda s: s.name)
def test_forward(shape, dtype, compare):
    operands = tensors(shape, dtype)
    streams = 4 if shape.residual else 2
    with torch.no_grad():
        compare(
            "norm forward", shape, dtype,
            {
                "fused_attn": lambda: own(shape, *operands),
                "torch": lambda: peer(shape, *operands),
            },
            bytes=streams * operands[0].nbytes, check=lambda: checked(shape, operands),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", NORMS, ids=lambda s: s.name)
def test_backward(shape, dtype, compare):
    operands = [None if t is None else t.requires_grad_() for t in tensors(shape, dtype)]
    inputs = [t for t in operands if t is not None]
    ours, theirs = own(shape, *operands), peer(shape, *operands)
    grad = torch.ones_like(ours)
    compare(
        "norm backward", shape, dtype,
        {
            "fused_attn": lambda: torch.autograd.grad(ours, inputs, grad, retain_graph=True),
            "torch": lambda: torch.autograd.grad(theirs, inputs, grad, retain_graph=True),
        },
        bytes=(4 if shape.residual else 3) * grad.nbytes,
    )  # fmt: skip
