"""Norms against torch's, and against its composition of dropout, sum and norm."""

from __future__ import annotations

import contract
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


def check(shape, dtype, gradients):
    x, residual, weight, bias = tensors(shape, dtype)

    def call(x, weight, bias, residual=None):
        return own(shape, x, residual, weight, bias)

    operands = [x, weight, bias] + ([] if residual is None else [residual])
    contract.check(shape.name, dtype, call, operands, gradients)


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
            bytes=streams * operands[0].nbytes, check=lambda: check(shape, dtype, gradients=False),
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
        check=lambda: check(shape, dtype, gradients=True),
    )  # fmt: skip
