"""flash-attn's function for decoding with a KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.compat.flash_attn.arguments import Window, check_per_sequence, common_of, mask_of
from fused_attn.decode import decode_attention
from fused_attn.functional import rotary_embedding


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention with the arguments of flash_attn.flash_attn_with_kvcache.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache: (batch_cache, capacity, num_heads_kv, head_dim), or (num_pages, page_size,
            num_heads_kv, head_dim) with block_table. Changed in place.
        v_cache: as k_cache, with head_dim_v.
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), written to the cache after the first
            cache_seqlens positions. None adds nothing.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2); rotate k and q. The positions of q
            are those of k; without causal and window_size, all are the first one. Require k.
        cache_seqlens: int, or (batch,) integers; positions of the cache that are in use. None means
            all.
        cache_batch_idx: (batch,) integers; the row of the cache of each sequence.
        cache_leftpad: (batch,) integers; first position of the cache that is visible.
        block_table: (batch, max_pages) integers; the pages of each sequence. flash-attn 3 calls it
            page_table.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ...; otherwise, pair the two halves.
        num_splits: ignored.
        return_softmax_lse: also return lse.
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, keywords: as in
            flash_attn_func.

    Returns:
        out, (batch, seqlen_q, num_heads, head_dim_v). With return_softmax_lse, also lse, (batch,
        num_heads, seqlen_q).

    Raises:
        NotImplementedError: an argument is not supported.
        ValueError, TypeError: an argument is invalid.
    """
    block_table = keywords.pop("page_table", None) if block_table is None else block_table
    options = common_of(
        "flash_attn_with_kvcache", q, softmax_scale, softcap, False, learnable_sink, keywords
    )
    if cache_batch_idx is not None:
        if block_table is not None:
            raise NotImplementedError("cache_batch_idx is not supported with block_table")
        check_per_sequence("cache_batch_idx", cache_batch_idx, q)
        block_table = cache_batch_idx[:, None]  # each row of the cache is used as a page
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k, got None")
        cache_seqlens = capacity
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((len(q),), cache_seqlens, dtype=torch.int32, device=q.device)
    cache_seqlens = torch.as_tensor(cache_seqlens, device=q.device)
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            raise ValueError("rotary_cos, rotary_sin and k must be given together")
        moves = causal or any(size is not None and size >= 0 for size in window_size)
        starts = cache_seqlens[:, None]

        def rotated(x: Tensor, moves: bool) -> Tensor:
            positions = starts + torch.arange(x.shape[1], device=x.device) * int(moves)
            return rotary_embedding(
                x.transpose(1, 2), rotary_cos, rotary_sin,
                positions=positions, interleaved=rotary_interleaved,
            ).transpose(1, 2)  # fmt: skip

        q, k = rotated(q, moves), rotated(k, True)
    mask = mask_of(causal, window_size, alibi_slopes)
    if cache_leftpad is not None:
        check_per_sequence("cache_leftpad", cache_leftpad, q)
        positions = torch.arange(capacity, device=q.device)
        visible = (positions >= cache_leftpad[:, None])[:, None, None]
        mask = masks.dense(visible) if mask is None else mask & masks.dense(visible)
    results = decode_attention(
        q.transpose(1, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        cache_lengths=cache_seqlens,
        key=None if k is None else k.transpose(1, 2),
        value=None if v is None else v.transpose(1, 2),
        block_table=block_table,
        attn_mask=mask,
        is_causal=False,
        return_lse=return_softmax_lse,
        **options,
    )
    if isinstance(results, tuple):
        return results[0].transpose(1, 2), results[1]
    return results.transpose(1, 2)
