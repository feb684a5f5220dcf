"""Attention against F.scaled_dot_product_attention and eager attention."""

from __future__ import annotations

import contract
import pytest
import torch
import torch.nn.functional as F
from shapes import ATTENTION, DECODE, MASKED, PACKED, TRAINING, Attention

import fused_attn

FLOAT = torch.float32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def own(shape, query, key, value, mask, bias=None):
    return fused_attn.scaled_dot_product_attention(
        query, key, value, mask if bias is None else bias, shape.dropout_p, enable_gqa=True,
        softcap=50.0 if shape.mask == "softcap" else None,
    )  # fmt: skip


def peer(shape, query, key, value, mask, bias=None):
    gqa = shape.kv_heads != shape.num_heads
    causal = shape.mask == "causal"
    return F.scaled_dot_product_attention(
        query, key, value, bias if causal or mask is None else mask, shape.dropout_p, causal,
        enable_gqa=gqa,
    )  # fmt: skip


def eager(shape, *args):
    """The reference of this package."""
    with fused_attn.use_backend("eager"):
        return own(shape, *args)


def with_eager(shape, ways, way):
    """The ways, and eager attention where its scores fit."""
    pairs = shape.batch * shape.num_heads * shape.seqlen_q * shape.seqlen_k
    return ways if pairs > 2**26 else ways | {"eager": way}


def operations(shape: Attention) -> float:
    return 4.0 * shape.visible() * shape.head_dim


def check(shape: Attention, dtype: torch.dtype, gradients: bool) -> None:
    """The contract on what is measured, for as many heads as eager attention can hold."""
    shape = shape.reduced()
    operands = [*shape.operands(dtype)]
    if shape.mask == "bias":
        operands.append(torch.zeros(shape.bias_size(), dtype=dtype))

    def call(query, key, value, *bias):
        return own(shape, query, key, value, shape.own_mask(), *bias)

    contract.check(shape.name, dtype, call, operands, gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [*ATTENTION, *MASKED, *DECODE], ids=lambda s: s.name)
def test_forward(shape, dtype, compare):
    operands, mask, other = shape.operands(dtype), shape.own_mask(), shape.torch_mask(dtype)
    with torch.no_grad():
        compare(
            "forward", shape, dtype,
            with_eager(
                shape,
                {
                    "fused_attn": lambda: own(shape, *operands, mask),
                    "sdpa": lambda: peer(shape, *operands, other),
                },
                lambda: eager(shape, *operands, mask),
            ),
            flops=operations(shape), bytes=2.0 * operands[1].nbytes,
            check=lambda: check(shape, dtype, gradients=False),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [*ATTENTION, *MASKED], ids=lambda s: s.name)
def test_backward(shape, dtype, compare):
    operands = [t.requires_grad_() for t in shape.operands(dtype)]
    mask, other = shape.own_mask(), shape.torch_mask(dtype)
    ways = with_eager(
        shape,
        {
            "fused_attn": lambda: own(shape, *operands, mask),
            "sdpa": lambda: peer(shape, *operands, other),
        },
        lambda: eager(shape, *operands, mask),
    )

    def backward(way):
        out = way()
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, operands, grad, retain_graph=True)

    compare(
        "backward", shape, dtype, {name: backward(way) for name, way in ways.items()},
        flops=2.5 * operations(shape), check=lambda: check(shape, dtype, gradients=True),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", TRAINING, ids=lambda s: s.name)
def test_training(shape, dtype, compare):
    """Forward and backward, with dropout or the gradient of a bias."""
    operands = [t.requires_grad_() for t in shape.operands(dtype)]
    bias = None
    if shape.mask == "bias":
        bias = torch.zeros(shape.bias_size(), dtype=dtype, requires_grad=True)
        operands.append(bias)
    grad = torch.ones(*operands[0].shape, dtype=dtype)

    def step(way):
        out = way(shape, *operands[:3], None, bias)
        return torch.autograd.grad(out, operands, grad)

    compare(
        "training", shape, dtype,
        with_eager(
            shape,
            {"fused_attn": lambda: step(own), "sdpa": lambda: step(peer)},
            lambda: step(eager),
        ),
        flops=3.5 * operations(shape), check=lambda: check(shape, dtype, gradients=True),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", PACKED, ids=lambda s: s.name)
def test_packed(shape, dtype, compare):
    """A packed batch, forward and backward, against the padded one."""
    rows, cu_seqlens = shape.packed(dtype)
    rows = [t.requires_grad_() for t in rows]
    padded, mask = [t.requires_grad_() for t in shape.operands(dtype)], shape.bool_mask()
    where = (cu_seqlens, cu_seqlens, shape.seqlen_q, shape.seqlen_k)

    def packed_out():
        return fused_attn.varlen_attention(*rows, *where)

    def padded_out():
        return peer(shape, *padded, mask)

    def step(out, operands):
        return torch.autograd.grad(out, operands, torch.ones_like(out))

    def check_packed():
        one_head = [t[:, :1] for t in rows]  # eager holds the scores
        contract.check(
            shape.name, dtype, lambda *t: fused_attn.varlen_attention(*t, *where), one_head, True
        )

    pairs = shape.num_heads * shape.head_dim * float(shape.lengths().square().sum())
    compare(
        "packed", shape, dtype,
        {
            "fused_attn": lambda: step(packed_out(), rows),
            "sdpa": lambda: step(padded_out(), padded),
        },
        flops=3.5 * 4.0 * pairs, check=check_packed,
    )  # fmt: skip
