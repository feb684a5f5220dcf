"""Tiled attention in torch operations that follows the kernels, with optional mistakes.

Tests use it to show that the numerics contract distinguishes correct kernels from wrong ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_attn.base import philox

BLOCK = 32  # number of keys per tile

# Name of a mistake -> its description.
MISTAKES = {
    "rescale": "the accumulator is not rescaled where the maximum grows",
    "weights": "float32 weights are rounded to bfloat16 before the PV product",
    "key_too_few": "the last visible key of a row in a partial tile is masked",
    "key_too_many": "the first masked key of a row in a partial tile is visible",
    "scale": "the scale has a relative error of 1e-4",
    "bias": "the bias of one tile is added after the softmax",
    "lse_residual": "the backward uses lse without its rounding residual",
    "stride": "the strides of two heads of V are swapped",
    "philox": "dropout uses the words of a Philox counter in the wrong order",
    "delta": "delta is computed from the rounded output",
}


@dataclass(frozen=True)
class Options:
    """Options of a call. All calls are causal with bottom-right alignment.

    Attributes:
        seed: seed of dropout.
        mistake: one of MISTAKES, or "" for none.
    """

    scale: float
    dropout_p: float
    seed: Tensor
    mistake: str = ""


class TiledAttention(torch.autograd.Function):
    """Tiled attention that returns out and lse, given query, key, value and a float bias.

    query, key and value have shape (batch, num_heads, seqlen, head_dim).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: Options
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (t.float() for t in (query, key, value))
        keep = _keep(q, k, options)
        if options.mistake == "stride":
            v = v.flip(1)
        rows = (*q.shape[:3], 1)
        maximum, total = q.new_full(rows, -torch.inf), q.new_zeros(rows)
        given_total = total  # row sum of the weights as rounded for the PV product
        sums = q.new_zeros(*q.shape[:3], v.shape[3])
        for start in range(0, k.shape[2], BLOCK):
            tile = slice(start, start + BLOCK)
            scores = _scores(q, k, bias, tile, options)
            above = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            finite = above.masked_fill(above.isinf(), 0.0)
            weights = torch.exp(scores - finite)
            if options.mistake == "bias" and start == 0:
                weights = (weights + bias[..., tile]).masked_fill(scores.isinf(), 0.0)
            factor = torch.exp(maximum - finite).nan_to_num(nan=0.0)
            if options.mistake == "rescale":
                factor = torch.ones_like(factor)
            given = weights.to(query.dtype).float()
            maximum, total = above, total * factor + weights.sum(-1, keepdim=True)
            given_total = given_total * factor + given.sum(-1, keepdim=True)
            if options.mistake == "weights":
                given = weights.bfloat16().float()
            sums = sums * factor + (given * keep[..., tile]) @ v[..., tile, :]
        empty = total == 0.0
        exact = sums / given_total.masked_fill(empty, 1.0)
        out = exact.to(query.dtype)
        exact_lse = maximum.double() + total.double().log()
        lse = exact_lse.float()
        residual = (exact_lse - lse).masked_fill(empty, 0.0).squeeze(-1)
        rest = exact - out.float()
        ctx.save_for_backward(query, key, value, bias, out, rest, lse, residual)
        ctx.options = options
        return out, lse.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        query, key, value, bias, out, rest, lse, residual = ctx.saved_tensors
        options = ctx.options
        q, k, v, grad = (t.float() for t in (query, key, value, grad_out))
        keep = _keep(q, k, options)
        whole = out.float() if options.mistake == "delta" else out.float() + rest
        delta = (grad * whole).sum(-1, keepdim=True) - grad_lse[..., None]
        low = torch.zeros_like(residual) if options.mistake == "lse_residual" else residual
        grads: list[list[Tensor]] = [[], [], []]
        grad_query = torch.zeros_like(q)
        for start in range(0, k.shape[2], BLOCK):
            tile = slice(start, start + BLOCK)
            scores = _scores(q, k, bias, tile, options)
            weights = torch.exp((scores - lse) - low.float()[..., None]).nan_to_num(nan=0.0)
            dropped = keep[..., tile]
            grad_weights = (grad @ v[..., tile, :].mT) * dropped
            grad_scores = weights * (grad_weights - delta)
            grad_query += (grad_scores @ k[..., tile, :]) * options.scale
            grads[0].append((grad_scores.mT @ q) * options.scale)
            grads[1].append((weights * dropped).mT @ grad)
            grads[2].append(grad_scores)
        grad_key, grad_value = (torch.cat(g, 2).to(query.dtype) for g in grads[:2])
        return grad_query.to(query.dtype), grad_key, grad_value, torch.cat(grads[2], -1), None


def _scores(q: Tensor, k: Tensor, bias: Tensor, tile: slice, options: Options) -> Tensor:
    off = 1.0001 if options.mistake == "scale" else 1.0
    scores = (q @ k[..., tile, :].mT) * (options.scale * off)
    if not (options.mistake == "bias" and tile.start == 0):
        scores = scores + bias[..., tile]
    last = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    last = last + {"key_too_few": -1, "key_too_many": 1}.get(options.mistake, 0)
    return scores.masked_fill(torch.arange(k.shape[2])[tile] > last, -torch.inf)


def _keep(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """Return the dropout factor of each weight: 0 or 1 / (1 - dropout_p)."""
    shape = (*q.shape[:3], k.shape[2])
    if options.dropout_p == 0.0:
        return q.new_ones(shape)
    keep = philox.attention_keep(options.seed, options.dropout_p, *shape)
    if options.mistake == "philox":
        octets = keep[..., : shape[3] // 8 * 8].unflatten(-1, (-1, 4, 2)).flip(-2)
        keep = torch.cat((octets.flatten(-3), keep[..., shape[3] // 8 * 8 :]), -1)
    return keep * philox.dropout_scale(options.dropout_p)
