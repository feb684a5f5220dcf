"""Attention against F.scaled_dot_product_attention and eager attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from shapes import ATTENTION, DECODE, MASKED, TRAINING, Attention

import fused_attn
from fused_attn.compare import GRAD_FACTOR, OUTPUT_FACTOR

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


def peer_mask(shape, dtype):
    """SDPA has no softcap; what ALiBi adds is a float mask of every score to it."""
    if shape.mask != "alibi":
        return shape.bool_mask()
    i, j = torch.arange(shape.seqlen_q)[:, None], torch.arange(shape.seqlen_k)[None, :]
    slopes = 2.0 ** -(torch.arange(shape.num_heads) + 1.0)
    bias = -slopes[:, None, None] * (i - j).abs()
    return bias.masked_fill(~shape.bool_mask(), float("-inf")).to(dtype)


def operations(shape: Attention) -> float:
    return 4.0 * shape.visible() * shape.head_dim


def checked(shape, operands, mask, bias=None):
    """The contract of the package on this very problem, one batch element of it."""
    if shape.dropout_p > 0:
        return  # tested bit by bit elsewhere
    options = {"enable_gqa": True, "softcap": 50.0 if shape.mask == "softcap" else None}
    attn_mask = mask if bias is None else bias

    def run(dtype, backend):
        x = [t.detach().to(dtype).requires_grad_() for t in operands]
        m = attn_mask if bias is None else attn_mask.detach()
        out = fused_attn.scaled_dot_product_attention(*x, m, backend=backend, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), x)]

    # The eager reference holds the scores: that is too much for the longest problems.
    if shape.batch * shape.num_heads * shape.seqlen_q * shape.seqlen_k > 2**27:
        return
    dtype = operands[0].dtype
    truth, eager, got = run(torch.float64, "eager"), run(dtype, "eager"), run(dtype, "cpp")
    for i, (t, e, g) in enumerate(zip(truth, eager, got, strict=True)):
        factor = OUTPUT_FACTOR if i == 0 else GRAD_FACTOR
        allowed = factor * (e.double() - t).abs().max()
        allowed = allowed + t.abs().max() * torch.finfo(dtype).eps
        assert (g.double() - t).abs().max() <= allowed, f"result {i} of {shape.name} is wrong"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [*ATTENTION, *MASKED, *DECODE], ids=lambda s: s.name)
def test_forward(shape, dtype, compare):
    operands, mask, other = shape.operands(dtype), shape.own_mask(), peer_mask(shape, dtype)
    with torch.no_grad():
        compare(
            "forward", shape, dtype,
            {
                "fused_attn": lambda: own(shape, *operands, mask),
                "sdpa": lambda: peer(shape, *operands, other),
            },
            flops=operations(shape), bytes=2.0 * operands[1].nbytes,
            check=lambda: torch.enable_grad()(checked)(shape, operands, mask),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [*ATTENTION, *MASKED], ids=lambda s: s.name)
def test_backward(shape, dtype, compare):
    operands = [t.requires_grad_() for t in shape.operands(dtype)]
    mask, other = shape.own_mask(), peer_mask(shape, dtype)
    ours, theirs = own(shape, *operands, mask), peer(shape, *operands, other)
    grad = torch.ones_like(ours)
    compare(
        "backward", shape, dtype,
        {
            "fused_attn": lambda: torch.autograd.grad(ours, operands, grad, retain_graph=True),
            "sdpa": lambda: torch.autograd.grad(theirs, operands, grad, retain_graph=True),
        },
        flops=2.5 * operations(shape),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", TRAINING, ids=lambda s: s.name)
def test_training(shape, dtype, compare):
    """Forward and backward, with dropout or the gradient of a bias."""
    operands = [t.requires_grad_() for t in shape.operands(dtype)]
    bias = None
    if shape.mask == "bias":
        size = (shape.num_heads, shape.seqlen_q, shape.seqlen_k)
        bias = torch.zeros(size, dtype=dtype, requires_grad=True)
        operands.append(bias)
    grad = torch.ones(*operands[0].shape, dtype=dtype)

    def step(way):
        out = way(shape, *operands[:3], None, bias)
        return torch.autograd.grad(out, operands, grad)

    compare(
        "training", shape, dtype,
        {"fused_attn": lambda: step(own), "sdpa": lambda: step(peer)},
        flops=3.5 * operations(shape),
        check=lambda: checked(shape, operands[:3], None, bias),
    )  # fmt: skip
