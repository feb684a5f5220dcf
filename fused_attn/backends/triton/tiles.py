"""Classification of tiles as skipped, partial or full, by the rules of csrc/block_ranges.h.

If a mask consists of bounds only, the attention kernels compute ranges of visible tiles. Ranges
suffice because neither end of the interval of visible keys decreases from one query to the next.
For documents, key masks and dense tensors, two small kernels classify all tiles, and list the
visible tiles of each row or column of tiles.

Full tiles are processed without mask code. All keys of a full tile exist, but its last queries may
be past the end of the sequence.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_attn.backends.triton.masks import (
    SIZES,
    Sizes,
    sequence_bounds,
    visible_keys,
    visible_queries,
)

# Must equal the constants in csrc/params.h and csrc/block_ranges.h.
SUMMARY_TILE_M, SUMMARY_TILE_N = tl.constexpr(32), tl.constexpr(64)
NONE_VISIBLE, SOME_VISIBLE, ALL_VISIBLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Tiles classified per program, tiles listed per iteration, 32 x 64 cells summarized per program.
KINDS_CHUNK, LIST_CHUNK, SUMMARY_CELLS = 16, 128, 4
WORD_ROWS = 64  # rows packed per program
SKIP, PARTIAL, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Summaries(NamedTuple):
    """Tile summaries of MaskSpec.dense and MaskSpec.bias, or None. A stride of 0 broadcasts."""

    dense: Any  # uint8 (batch, num_heads, ceil(seqlen_q / 32), ceil(seqlen_k / 64))
    dense_stride_b: int
    dense_stride_h: int
    dense_stride_q: int
    dense_stride_k: int
    bias: Any  # same dtype and shape
    bias_stride_b: int
    bias_stride_h: int
    bias_stride_q: int
    bias_stride_k: int


class TileLists(NamedTuple):
    """Lists of the visible tiles of each owner, which is a query tile or a KV block.

    The tensors are None if ranges describe the visible tiles.
    """

    counts: Any  # int32 (batch, heads, owners, 2): number of full and of partial tiles
    indices: Any  # int32 (batch, heads, owners, others): full from the front, partial from the end
    heads: int  # 1 if the mask is the same for all heads


# ---- ranges -------------------------------------------------------------------------------------


@triton.jit
def key_tiles(bounds, i_begin, i_end, seqlen_k, BLOCK_N: tl.constexpr):
    """Return the ranges of KV blocks that are visible to the queries [i_begin, i_end).

    The result is (lo, hi, full_lo, full_hi). The blocks [lo, hi) are visible, and
    [full_lo, full_hi) among them are full.
    """
    query_begin, query_end = bounds.query_begin, bounds.query_end
    first, last = tl.maximum(i_begin, query_begin), tl.minimum(i_end, query_end) - 1
    top_lo, top_hi = visible_keys(bounds, first)
    bottom_lo, bottom_hi = visible_keys(bounds, last)
    lo = top_lo // BLOCK_N
    any_visible = (first <= last) & (top_lo < seqlen_k)
    hi = tl.where(any_visible, tl.cdiv(tl.maximum(bottom_hi, 0), BLOCK_N), lo)
    hi = tl.maximum(hi, lo)
    inside = (i_begin >= query_begin) & (i_end <= query_end)
    full_lo = tl.minimum(tl.cdiv(bottom_lo, BLOCK_N), hi)
    full_hi = tl.where(inside, tl.maximum(top_hi, 0) // BLOCK_N, full_lo)
    return lo, hi, full_lo, tl.maximum(tl.minimum(full_hi, hi), full_lo)


@triton.jit
def query_tiles(bounds, j_begin, j_end, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr):
    """Return the ranges of query tiles that attend to the keys [j_begin, j_end).

    This is the inverse of `key_tiles`. The result has the same form.
    """
    first_key = tl.maximum(j_begin, bounds.key_begin)
    last_key = tl.minimum(tl.minimum(j_end, seqlen_k), bounds.key_end) - 1
    first, _ = visible_queries(bounds, first_key)
    _, end = visible_queries(bounds, last_key)
    lo = first // BLOCK_M
    any_visible = (first_key <= last_key) & (first < end)
    hi = tl.where(any_visible, tl.cdiv(tl.maximum(end, 0), BLOCK_M), lo)
    first, _ = visible_queries(bounds, j_end - 1)
    _, end = visible_queries(bounds, j_begin)
    end = tl.where(end >= seqlen_q, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M, end)
    inside = (bounds.key_begin <= j_begin) & (bounds.key_end >= j_end)
    full_lo = tl.minimum(tl.cdiv(first, BLOCK_M), hi)
    full_hi = tl.where(inside, tl.maximum(end, 0) // BLOCK_M, full_lo)
    return lo, hi, full_lo, tl.maximum(tl.minimum(full_hi, hi), full_lo)


@triton.jit
def visible_tiles(ranges, lists, b, h, owner, owners, others):
    """Return the numbers of full and partial tiles of an owner, and their positions.

    `owner` is one of `owners` query tiles, and its tiles are among `others` KV blocks, or vice
    versa. The result is the argument `tiles` of `full_tile` and `partial_tile`.
    """
    if lists.counts is None:
        lo, hi, full_lo, full_hi = ranges
        num_full = full_hi - full_lo
        return num_full, hi - lo - num_full, lo, full_lo
    else:
        at = (b.to(tl.int64) * lists.heads + h % lists.heads) * owners + owner
        counts = lists.counts + at * 2
        indices = lists.indices + at * others
        return tl.load(counts), tl.load(counts + 1), indices + (others - 1), indices


@triton.jit
def full_tile(t, tiles, lists):
    """Return the index of the t-th full tile; an arbitrary index if there are fewer.

    Loops read the index one iteration ahead, because K and V cannot be prefetched without it.
    """
    if lists.counts is None:
        return tiles[3] + t
    else:
        return tl.load(tiles[3] + t, t < tiles[0], 0)


@triton.jit
def partial_tile(t, tiles, lists):
    """Return the index of the t-th partial tile; an arbitrary index if there are fewer.

    In a range, the partial tiles before the full tiles are counted first.
    """
    if lists.counts is None:
        tile = tiles[2] + t
        return tl.where(tile >= tiles[3], tile + tiles[0], tile)
    else:
        return tl.load(tiles[2] - t, t < tiles[1], 0)


@triton.jit
def any_tile(t, tiles, lists):
    """Return the index of the t-th visible tile, full or partial."""
    if lists.counts is None:
        return tiles[2] + t
    else:
        partial = partial_tile(tl.maximum(t - tiles[0], 0), tiles, lists)
        return tl.where(t < tiles[0], full_tile(t, tiles, lists), partial)


# ---- lists --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def tile_kinds_kernel(
    kinds, mask, summaries,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    heads, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Classify tiles as SKIP, PARTIAL or FULL, CHUNK per program.

    kinds: uint8 (batch, heads, num_m, num_n).
    """
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m, num_n = tl.cdiv(seqlen_q, BLOCK_M), tl.cdiv(seqlen_k, BLOCK_N)
    row = tl.program_id(0)
    m, bh = row % num_m, row // num_m
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    bounds = sequence_bounds(mask, sizes, bh // heads)
    i_begin = m * BLOCK_M
    i_end = tl.minimum(i_begin + BLOCK_M, sizes.seqlen_q)
    lo, hi, full_lo, full_hi = key_tiles(bounds, i_begin, i_end, sizes.seqlen_k, BLOCK_N)
    n = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    visible = (n >= lo) & (n < hi)
    full = (n >= full_lo) & (n < full_hi)
    j = (n * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    exists = (j < sizes.seqlen_k) & visible[:, None]
    if mask.query_documents is not None:
        i = i_begin + tl.arange(0, BLOCK_M)
        # Replace queries and keys past the end by the first query and key of the tile.
        i = tl.where(i < i_end, i, i_begin)
        query = tl.load(mask.query_documents + b * mask.query_documents_stride_b + i)
        within = tl.where(exists, j, (n * BLOCK_N)[:, None])
        at = mask.key_documents + b * mask.key_documents_stride_b + within
        key = tl.load(at, visible[:, None], 0)
        query_min, query_max = tl.min(query, 0), tl.max(query, 0)
        key_min, key_max = tl.min(key, 1), tl.max(key, 1)
        visible &= (query_max >= key_min) & (key_max >= query_min)
        full &= (query_min == query_max) & (key_min == key_max)
    if mask.key_mask is not None:
        at = mask.key_mask + b * mask.key_mask_stride_b + h * mask.key_mask_stride_h
        key_visible = tl.load(at + j.to(tl.int64) * mask.key_mask_stride_k, exists, 0) != 0
        count = tl.sum(key_visible.to(tl.int32), 1)
        visible &= count > 0
        full &= count == BLOCK_N
    if summaries.dense is not None:
        at = summaries.dense + b * summaries.dense_stride_b + h * summaries.dense_stride_h
        some, every = _summarized(
            at, summaries.dense_stride_q, summaries.dense_stride_k, i_begin, i_end, n, visible,
            sizes.seqlen_k, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        visible &= some
        full &= every
    if summaries.bias is not None:
        at = summaries.bias + b * summaries.bias_stride_b + h * summaries.bias_stride_h
        some, every = _summarized(
            at, summaries.bias_stride_q, summaries.bias_stride_k, i_begin, i_end, n, visible,
            sizes.seqlen_k, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        visible &= some
        full &= every
    kind = tl.where(visible, tl.where(full, FULL, PARTIAL), SKIP)
    tl.store(kinds + row.to(tl.int64) * num_n + n, kind.to(tl.uint8), n < num_n)


@triton.jit
def _summarized(
    base, stride_q, stride_k, i_begin, i_end, n, wanted, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return, for each tile n, whether any position may be visible and whether all are visible.

    Both flags derive from the summaries of the 32 x 64 cells that the tile overlaps.
    """
    some, every = n < 0, n >= 0
    for r in tl.static_range(0, (BLOCK_M + SUMMARY_TILE_M - 1) // SUMMARY_TILE_M):
        i = i_begin // SUMMARY_TILE_M + r
        for c in tl.static_range(0, (BLOCK_N + SUMMARY_TILE_N - 1) // SUMMARY_TILE_N):
            j = n * BLOCK_N // SUMMARY_TILE_N + c
            inside = wanted & (j * SUMMARY_TILE_N < seqlen_k) & (i * SUMMARY_TILE_M < i_end)
            at = base + i.to(tl.int64) * stride_q + j * stride_k
            cell = tl.load(at, inside, SOME_VISIBLE)
            some |= inside & (cell != NONE_VISIBLE)
            every &= (inside == 0) | (cell == ALL_VISIBLE)
    return some, every


@triton.jit(do_not_specialize=["owners", "others", "stride_owner", "stride_other"])
def list_tiles_kernel(
    kinds, counts, indices, owners, others, stride_owner, stride_other, CHUNK: tl.constexpr
):
    """List the full and partial tiles of each owner, which is a row or a column of `kinds`."""
    pid = tl.program_id(0)
    owner, bh = pid % owners, (pid // owners).to(tl.int64)
    kinds += bh * owners * others + owner.to(tl.int64) * stride_owner
    indices += pid.to(tl.int64) * others
    num_full, num_partial = pid * 0, pid * 0
    for start in range(0, others, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        kind = tl.load(kinds + tile.to(tl.int64) * stride_other, tile < others, SKIP)
        full, partial = (kind == FULL).to(tl.int32), (kind == PARTIAL).to(tl.int32)
        at_full = num_full + tl.cumsum(full, 0) - 1
        at_partial = others - num_partial - tl.cumsum(partial, 0)
        tl.store(indices + at_full, tile, full != 0)
        tl.store(indices + at_partial, tile, partial != 0)
        num_full += tl.sum(full, 0)
        num_partial += tl.sum(partial, 0)
    tl.store(counts + pid.to(tl.int64) * 2, num_full)
    tl.store(counts + pid.to(tl.int64) * 2 + 1, num_partial)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_m", "num_n"])
def tile_summary_kernel(
    data, stride_b, stride_h, stride_q, stride_k, summary, num_heads, seqlen_q, seqlen_k, num_m,
    num_n, IS_BOOL: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Summarize the 32 x 64 cells of a dense mask (uint8) or bias, CELLS cells per program."""
    row = tl.program_id(0)
    m, bh = row % num_m, row // num_m
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    first = tl.program_id(1) * CELLS
    i = m * SUMMARY_TILE_M + tl.arange(0, SUMMARY_TILE_M)[:, None]
    j = first * SUMMARY_TILE_N + tl.arange(0, CELLS * SUMMARY_TILE_N)[None, :]
    exists = (i < seqlen_q) & (j < seqlen_k)
    at = data + b * stride_b + h * stride_h
    value = tl.load(at + i.to(tl.int64) * stride_q + j.to(tl.int64) * stride_k, exists, 0)
    some = (value != 0) if IS_BOOL else (value != float("-inf"))
    every = (value != 0) if IS_BOOL else (value == 0)
    shape: tl.constexpr = (SUMMARY_TILE_M, CELLS, SUMMARY_TILE_N)
    some = tl.sum(tl.reshape((some & exists).to(tl.int32), shape), 2)
    missing = tl.sum(tl.reshape(((every == 0) & exists).to(tl.int32), shape), 2)
    some, missing = tl.sum(some, 0), tl.sum(missing, 0)
    shows = tl.where(some == 0, NONE_VISIBLE, tl.where(missing == 0, ALL_VISIBLE, SOME_VISIBLE))
    n = first + tl.arange(0, CELLS)
    tl.store(summary + row.to(tl.int64) * num_n + n, shows.to(tl.uint8), n < num_n)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_m", "num_words"])
def pack_words_kernel(
    dense, stride_b, stride_h, stride_q, stride_k, words, num_heads, seqlen_q, seqlen_k, num_m,
    num_words, ROWS: tl.constexpr,
):  # fmt: skip
    """Pack a dense mask (uint8) into bits.

    words: int64 (batch, num_heads, num_words, seqlen_q). Bit k of word w is key 64 w + k. A tile
    then loads one word per query, instead of bytes whose layout differs from that of the matmul.
    """
    row, w = tl.program_id(0), tl.program_id(1)
    m, bh = row % num_m, row // num_m
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    i, bit = m * ROWS + tl.arange(0, ROWS), tl.arange(0, 64)
    j = w * 64 + bit
    at = dense + b * stride_b + h * stride_h
    at += i.to(tl.int64)[:, None] * stride_q + j.to(tl.int64)[None, :] * stride_k
    visible = tl.load(at, (i < seqlen_q)[:, None] & (j < seqlen_k)[None, :], 0) != 0
    packed = tl.sum(visible.to(tl.int64) << bit.to(tl.int64)[None, :], 1)
    tl.store(words + (bh.to(tl.int64) * num_words + w) * seqlen_q + i, packed, i < seqlen_q)
