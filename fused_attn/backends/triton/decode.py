"""Split-KV attention of a few queries to many keys, which is limited by memory bandwidth.

The queries of all heads that share a KV head are the rows of one tile, so the keys of the KV head
are read once. The keys are split among programs. A second kernel rescales the partial results to
the largest score, and merges them.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_attn.backends.triton.attention_tile import (
    Keys,
    dropout_counters,
    head_rows,
    hides_values,
    power,
    sequence_rows,
)
from fused_attn.backends.triton.forward import attend, store_lse
from fused_attn.backends.triton.masks import SIZES, Sequence, Sizes, sequence_bounds, tile_key_range
from fused_attn.backends.triton.tiles import key_tiles, visible_tiles


class Parts(NamedTuple):
    """Partial results of each KV split, contiguous in float32, with the rows of lse."""

    maximum: Any  # (rows, num_parts): largest score
    total: Any  # (rows, num_parts): sum of the weights
    weighted: Any  # (rows, num_parts, head_dim_v): sum of the weighted values


@triton.jit(do_not_specialize=[*SIZES, "num_parts"])
def attention_decode_kernel(
    query, key, value, parts, seed, cu_seqlens_q, cu_seqlens_k, mask, no_lists,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    settings, num_parts, const: tl.constexpr,
):  # fmt: skip
    """Compute the partial results of one KV split of a KV head for BLOCK_M rows.

    A row is one query of one of the heads that share the KV head.
    """
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    group = num_heads // num_heads_kv
    num_m = tl.cdiv(group * seqlen_q, const.BLOCK_M)
    pid = tl.program_id(0)
    part, rest = pid % num_parts, pid // num_parts
    m, bh = rest % num_m, rest // num_m
    b, h_kv = bh // sizes.num_heads_kv, bh % sizes.num_heads_kv
    query_batch, query_first, seqlen_q = sequence_rows(cu_seqlens_q, b, sizes.seqlen_q)
    key_batch, key_first, seqlen_k = sequence_rows(cu_seqlens_k, b, sizes.seqlen_k)
    if seqlen_q == 0:
        return
    row = m * const.BLOCK_M + tl.arange(0, const.BLOCK_M)
    i, in_group = row % sizes.seqlen_q, row // sizes.seqlen_q
    inside = (in_group < group) & (i < seqlen_q)
    h = h_kv * group + tl.where(inside, in_group, 0)

    bounds = sequence_bounds(mask, sizes, b)
    sequence = Sequence(b, h, seqlen_q, seqlen_k, bounds)
    lo, hi, full_lo, full_hi = key_tiles(bounds, 0, seqlen_q, sizes.seqlen_k, const.BLOCK_N)
    each = tl.cdiv(hi - lo, num_parts)
    begin = lo + part * each
    end = tl.maximum(tl.minimum(begin + each, hi), begin)
    if hides_values(mask):
        full_lo, full_hi = end, end
    full_lo = tl.minimum(tl.maximum(full_lo, begin), end)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), end)
    tiles = visible_tiles((begin, end, full_lo, full_hi), no_lists, b, h_kv, 0, 1, 1)
    key_begin, key_end = tile_key_range(bounds, 0, seqlen_q, seqlen_k)
    key_at = head_rows(key, key_batch, h_kv, key_first)
    value_at = head_rows(value, key_batch, h_kv, key_first)
    keys = Keys(key_at, value_at, key_begin, key_end)

    column = tl.arange(0, const.BLOCK_D)[None, :]
    query_at = head_rows(query, query_batch, h_kv * group, query_first)
    row_at = (h - h_kv * group).to(tl.int64) * query.stride_h + i.to(tl.int64) * query.stride_row
    q = tl.load(
        query_at + row_at[:, None] + column, inside[:, None] & (column < const.HEAD_DIM), 0.0
    )
    draws = None
    if seed is not None:
        draws = dropout_counters(tl.load(seed), settings, sizes, b)
    acc, maximum, total, _ = attend(
        q, i, tiles, no_lists, keys, sequence, key, value, draws, mask, settings, const, False
    )

    at = (query_batch.to(tl.int64) * sizes.num_heads + h) * sizes.total_q + query_first + i
    at = at * num_parts + part
    tl.store(parts.maximum + at, maximum, inside)
    tl.store(parts.total + at, total, inside)
    column = tl.arange(0, const.BLOCK_DV)[None, :]
    weighted = parts.weighted + at[:, None] * const.HEAD_DIM_V + column
    tl.store(weighted, acc, inside[:, None] & (column < const.HEAD_DIM_V))


@triton.jit(do_not_specialize=["num_heads", "total_q", "num_parts"])
def merge_parts_kernel(
    parts, out, lse, num_heads, total_q, settings, num_parts, const: tl.constexpr
):
    """Merge the KV splits of one query of a head, and store its out and lse."""
    at = tl.program_id(0).to(tl.int64)
    head, row = at // total_q, at % total_q
    column = tl.arange(0, const.BLOCK_DV)
    in_row = column < const.HEAD_DIM_V
    part = at * num_parts
    largest, total = tl.load(parts.maximum + part), tl.load(parts.total + part)
    acc = tl.load(parts.weighted + part * const.HEAD_DIM_V + column, in_row, 0.0)
    for _ in range(1, num_parts):
        part += 1
        maximum = tl.load(parts.maximum + part)
        weighted = tl.load(parts.weighted + part * const.HEAD_DIM_V + column, in_row, 0.0)
        before, largest = largest, tl.maximum(largest, maximum)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        rescale, share = power(before - shift, const), power(maximum - shift, const)
        total = total * rescale + tl.load(parts.total + part) * share
        acc = acc * rescale + weighted * share
    empty = total == 0.0
    acc = tl.where(empty, 0.0, acc * (settings.dropout_scale / tl.where(empty, 1.0, total)))
    out_at = head_rows(out, head // num_heads, head % num_heads, row) + column
    tl.store(out_at, acc.to(out_at.dtype.element_ty), in_row)
    store_lse(lse, None, at, True, largest, total, const)
