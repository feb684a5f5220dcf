"""Classification of a mask's tiles by the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.backends.cpp import _cpu
from fused_attn.backends.fields import DTYPES
from fused_attn.base.threads import num_threads
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.spec import MaskSpec


def tile_kinds(
    spec: MaskSpec, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, int]]:
    """Return the kinds of a mask's tiles, classified by the CPU kernels.

    Returns:
        The kinds and the tile size. The kinds are uint8 (batch, num_heads, query tiles, KV blocks):
        0 for skipped, 1 for partial and 2 for full tiles. The tile size is (queries, keys).
    """
    query_tile, kv_block = _cpu.tile_size(DTYPES[dtype])
    shape = (batch, num_heads, -(-seqlen_q // query_tile), -(-seqlen_k // kv_block))
    kinds = torch.empty(shape, dtype=torch.uint8)
    query = torch.empty(batch, num_heads, seqlen_q, 0, dtype=dtype)
    key = torch.empty(batch, num_heads, seqlen_k, 0, dtype=dtype)
    call = AttentionCall(query, key, key, spec, AttentionOptions(1.0))
    _cpu.tile_kinds(call, kinds=kinds, num_threads=num_threads())
    return kinds, (query_tile, kv_block)
