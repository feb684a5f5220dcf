"""Attention computed as two partial results over parts of the keys, for `fused-attn verify`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, problem_of, select
from fused_attn.call.calls import AttentionBackward, AttentionCall
from fused_attn.call.merged import MergedOutputs
from fused_attn.masks.restrict import of_positions


def merged_attention(call: AttentionCall) -> Tensor:
    """Compute attention as two partial results (`AttentionOptions.partial`), and merge them.

    The first part has a third of the keys. The result is differentiable in query, key and value.

    Args:
        call: a validated call with partial results, with at least two keys, without dropout, prefix
            and packed sequences.

    Returns:
        out, in the dtype of query.

    Raises:
        NotImplementedError: the selected backend does not support the call.
    """
    out: Tensor = _Merged.apply(call, select(problem_of(call)), call.query, call.key, call.value)
    return out


class _Merged(Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, backend: Backend, *qkv: Tensor) -> Tensor:
        parts = _parts(call)
        for_backward = any(t.requires_grad for t in qkv)
        sums = MergedOutputs(call.query, call.value)
        for part in parts:
            own = backend.attention_fwd(part, for_backward, True)
            assert own is not None  # validated calls are not refused
            sums.add(own, slice(None))
        merged = sums.finish(call.query.dtype).without_none()
        ctx.backend, ctx.parts, ctx.merged = backend, parts, merged
        return merged.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = grad_out.contiguous()
        grads = [
            ctx.backend.attention_bwd(AttentionBackward(part, ctx.merged, grad_out, None, False))
            for part in ctx.parts
        ]
        dtype = grad_out.dtype
        query = sum(own.query for own in grads).to(dtype)
        key, value = (
            torch.cat(own, 2).to(dtype) for own in zip(*(g[1:3] for g in grads), strict=True)
        )
        return None, None, query, key, value


def _parts(call: AttentionCall) -> list[AttentionCall]:
    """Return the calls of the two parts of the keys."""
    seqlen_q, seqlen_k = call.query.shape[2], call.key.shape[2]
    middle = seqlen_k // 3 + 1
    return [
        replace(
            call,
            key=call.key[:, :, keys.start : keys.stop],
            value=call.value[:, :, keys.start : keys.stop],
            mask=of_positions(call.mask, range(seqlen_q), keys),
        )
        for keys in (range(middle), range(middle, seqlen_k))
    ]
