"""Decoding with flash-attn 2, which appends to a KV cache and reads its pages in the kernel.

The kernel does not load values after the end of a sequence, where a cache may be non-finite.
flash-attn 4 requires finite values there, and flash-attn 3 specifies nothing, so neither is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.backends import reference
from fused_attn.backends.flash.engines import FlashAttention2, aligned, is_aligned, masked_lse
from fused_attn.backends.flash.plan import MaskPlan, plan_of
from fused_attn.call.attention import AttentionCall
from fused_attn.call.kv_cache import CacheUpdate
from fused_attn.masks.band import band_of
from fused_attn.masks.memo import recall_on_tensor

PAGE_MULTIPLE = 256  # positions; flash-attn 2 rejects other page sizes


def decode(
    engine: FlashAttention2, call: AttentionCall, update: CacheUpdate
) -> tuple[Tensor, Tensor] | None:
    """Append to the caches and attend to them; None if the kernel does not support the call.

    Arguments and results are those of `Backend.attention_decode`. The engine must support the
    problem.
    """
    query, key, value, spec = call.query, call.key, call.value, call.mask
    table, band = update.block_table, band_of(call.mask)
    if band is None or band.left or band.lengths != 1:  # padding in addition to the cache lengths
        return None
    if query.shape[3] % 8 or (table is not None and key.shape[2] % PAGE_MULTIPLE):
        return None
    if not (is_aligned(key.transpose(1, 2)) and is_aligned(value.transpose(1, 2))):
        return None  # a copy of the caches would not be updated
    plan = plan_of(band, False, query.shape[2], update.capacity)
    if not isinstance(plan, MaskPlan) or plan.square:
        return None
    new = [t if t is None else aligned(t.transpose(1, 2)) for t in (update.key, update.value)]
    slopes, left = spec.slopes, plan.left
    if slopes is not None:
        slopes = (slopes[0] if slopes.shape[0] == 1 else slopes).contiguous()
        left = engine.alibi_left(left, plan.right, update.capacity)
    query, scale = reference.with_positive_scale(query, float(call.options.scale))
    out, lse = engine.function("flash_attn_with_kvcache")(
        q=aligned(query.transpose(1, 2)),
        k_cache=key.transpose(1, 2),
        v_cache=value.transpose(1, 2),
        k=new[0],
        v=new[1],
        cache_seqlens=_int32(update.lengths),
        block_table=None if table is None else _int32(table),
        softmax_scale=scale,
        **engine.window(left, plan.right),
        softcap=float(call.options.softcap),
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    return out.transpose(1, 2), masked_lse(lse)


def _int32(integers: Tensor) -> Tensor:
    """Return integers as contiguous int32, converted once for all layers."""
    if integers.dtype == torch.int32:
        return integers.contiguous()

    def make() -> Tensor:
        return integers.to(torch.int32).contiguous()

    return recall_on_tensor(integers, "flash int32", (integers,), make)
