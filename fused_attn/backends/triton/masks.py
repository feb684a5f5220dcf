"""Masks in kernels: the visible elements of a tile, and the terms added to its scores.

The structural conditions (band, key range, prefix) reduce to one interval of visible keys
[lo(i), hi(i)) per row i, so an element costs two comparisons in every case. Positions are int32:
they stay below `fused_attn.masks.UNLIMITED`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


class MaskArgs(NamedTuple):
    """Tensors and strides of a MaskSpec; None means absent, a stride of 0 broadcasts."""

    bounds: Any  # (batch, 8), the columns of masks.spec.BOUNDS
    query_documents: Any  # (batch, seqlen_q)
    query_documents_stride_b: int
    key_documents: Any
    key_documents_stride_b: int
    slopes: Any  # (batch, num_heads)
    slopes_stride_b: int
    slopes_stride_h: int
    key_mask: Any  # bytes (batch, num_heads, 1, seqlen_k)
    key_mask_stride_b: int
    key_mask_stride_h: int
    key_mask_stride_q: int
    key_mask_stride_k: int
    dense: Any  # bytes (batch, num_heads, seqlen_q, seqlen_k)
    dense_stride_b: int
    dense_stride_h: int
    dense_stride_q: int
    dense_stride_k: int
    bias: Any  # float, the same shape
    bias_stride_b: int
    bias_stride_h: int
    bias_stride_q: int
    bias_stride_k: int


class Sizes(NamedTuple):
    """Integers that change from call to call.

    They are separate, unspecialised arguments of kernels. Triton specialises integers in a tuple:
    it recompiles if one becomes 1, or starts or stops being a multiple of 16.
    """

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int  # the largest number of rows of a sequence
    seqlen_k: int
    total_q: int  # rows of a head in lse
    band_lo: int
    band_hi: int
    alibi_offset: int


SIZES = list(Sizes._fields)


class Bounds(NamedTuple):
    """A row of MaskSpec.bounds as int32; see csrc/params.h, SequenceBounds."""

    key_begin: Any
    key_end: Any
    query_begin: Any
    query_end: Any
    band_lo: Any
    band_hi: Any
    prefix_end: Any
    alibi_offset: Any


class Sequence(NamedTuple):
    """A head of a sequence; with packed heads, h holds the head of each row of the tile."""

    b: Any
    h: Any
    seqlen_q: Any
    seqlen_k: Any
    bounds: Any  # Bounds


@triton.jit
def sequence_bounds(mask, sizes, b):
    """Return the Bounds of sequence b.

    A band that leaves rows without keys is expressed as a smaller key_end; csrc/block_ranges.h
    explains why.
    """
    at = stored_bounds(mask, sizes, b)
    key_end = tl.where(at.band_lo > at.band_hi, at.key_begin, at.key_end)
    # With j >= i + band_lo > i, the prefix's j <= i never holds: only j < prefix_end remains.
    beyond = (at.band_lo > 0) & (at.prefix_end > 0)
    key_end = tl.where(beyond, tl.minimum(key_end, at.prefix_end), key_end)
    prefix_end = tl.where(beyond, 0, at.prefix_end)
    return Bounds(
        at.key_begin, key_end, at.query_begin, at.query_end, at.band_lo, at.band_hi, prefix_end,
        at.alibi_offset,
    )  # fmt: skip


@triton.jit
def stored_bounds(mask, sizes, b):
    """Load the Bounds of sequence b as stored in MaskSpec."""
    if mask.bounds is not None:
        at = mask.bounds + b * 8
        return Bounds(
            tl.load(at).to(tl.int32),
            tl.load(at + 1).to(tl.int32),
            tl.load(at + 2).to(tl.int32),
            tl.load(at + 3).to(tl.int32),
            tl.load(at + 4).to(tl.int32),
            tl.load(at + 5).to(tl.int32),
            tl.load(at + 6).to(tl.int32),
            tl.load(at + 7).to(tl.int32),
        )
    else:
        zero = b * 0
        return Bounds(
            zero,
            zero + sizes.seqlen_k,
            zero,
            zero + sizes.seqlen_q,
            zero + sizes.band_lo,
            zero + sizes.band_hi,
            zero,
            zero + sizes.alibi_offset,
        )


@triton.jit
def visible_keys(bounds, i):
    """Return the range [lo, hi) of keys that the structural conditions let query i attend to.

    It does not check that i is within the query range.
    """
    hi = tl.minimum(bounds.key_end, i + bounds.band_hi + 1)
    prefix_end = bounds.prefix_end
    hi = tl.where(prefix_end > 0, tl.minimum(hi, tl.maximum(prefix_end, i + 1)), hi)
    return tl.maximum(bounds.key_begin, i + bounds.band_lo), hi


@triton.jit
def visible_queries(bounds, j):
    """Return the queries [lo, hi) that may attend to key j by the structural conditions.

    The inverse of `visible_keys`, within the query range.
    """
    prefix_end = bounds.prefix_end
    lo = tl.maximum(bounds.query_begin, j - bounds.band_hi)
    lo = tl.where((prefix_end == 0) | (j < prefix_end), lo, tl.maximum(lo, j))
    hi = tl.minimum(bounds.query_end, j - bounds.band_lo + 1)
    return lo, tl.where((j >= bounds.key_begin) & (j < bounds.key_end), hi, lo)


@triton.jit
def seen_keys(bounds, i_begin, i_end, seqlen_k):
    """Return the keys that are structurally visible to any of the rows [i_begin, i_end).

    Other keys are not loaded.
    """
    begin, _ = visible_keys(bounds, tl.maximum(i_begin, bounds.query_begin))
    _, end = visible_keys(bounds, tl.minimum(i_end, bounds.query_end) - 1)
    return begin, tl.minimum(end, seqlen_k)


@triton.jit
def across(vector, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Expand a vector, with one value per key (KEYS) or per query, to broadcast over a tile."""
    return vector[:, None] if KEYS == KEYS_FIRST else vector[None, :]


@triton.jit
def add_alibi(scores, i, j, sequence, mask, cut: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Add ALiBi to scores in natural units."""
    if mask.slopes is not None:
        at = sequence.b * mask.slopes_stride_b + sequence.h * mask.slopes_stride_h
        slope = tl.load(mask.slopes + at)
        if cut.PACKED_HEADS:
            slope = slope[:, None]
        position = across(i + sequence.bounds.alibi_offset, False, KEYS_FIRST)
        distance = tl.abs(position - across(j, True, KEYS_FIRST))
        return scores - slope * distance.to(tl.float32)
    else:
        return scores


@triton.jit
def apply_mask(scores, i, j, sequence, mask, cut: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return the scores of a partial tile, with the bias added, and their visibility.

    Masked scores become -inf, even if they were NaN. Vectors are loaded as vectors and then
    broadcast: a thread would load (rows, 1) once for each column that it holds.

    KEYS_FIRST: the tile is (keys, queries). A thread then holds few keys and many queries, so
    one interval of queries per key takes fewer registers than one interval of keys per query.
    """
    bounds, seqlen_k = sequence.bounds, sequence.seqlen_k
    b, h = sequence.b.to(tl.int64), sequence.h.to(tl.int64)  # strides may be large
    row, column = across(i, False, KEYS_FIRST), across(j, True, KEYS_FIRST)
    if KEYS_FIRST:
        lo, hi = visible_queries(bounds, j)
        visible = (row >= across(lo, True, True)) & (row < across(hi, True, True))
    else:
        lo, hi = visible_keys(bounds, i)
        hi = tl.where((i >= bounds.query_begin) & (i < bounds.query_end), hi, lo)
        visible = (column >= across(lo, False, False)) & (column < across(hi, False, False))
    if mask.query_documents is not None:
        query_at = mask.query_documents + b * mask.query_documents_stride_b + i
        key_at = mask.key_documents + b * mask.key_documents_stride_b + j
        query_ids = tl.load(query_at, i < sequence.seqlen_q, 0).to(tl.int32)
        key_ids = tl.load(key_at, j < seqlen_k, 0).to(tl.int32)
        visible &= across(query_ids, False, KEYS_FIRST) == across(key_ids, True, KEYS_FIRST)
    head = h[:, None] if cut.PACKED_HEADS else h
    if mask.key_mask is not None:
        at = mask.key_mask + b * mask.key_mask_stride_b + head * mask.key_mask_stride_h
        if cut.PACKED_HEADS:
            visible &= tl.load(at + column.to(tl.int64) * mask.key_mask_stride_k, visible, 0) != 0
        else:
            seen = tl.load(at + j.to(tl.int64) * mask.key_mask_stride_k, j < seqlen_k, 0) != 0
            visible &= across(seen, True, KEYS_FIRST)
    if mask.dense is not None:
        at = mask.dense + b * mask.dense_stride_b + head * mask.dense_stride_h
        at += row.to(tl.int64) * mask.dense_stride_q + column.to(tl.int64) * mask.dense_stride_k
        visible &= tl.load(at, visible, 0) != 0
    if mask.bias is not None:
        at = mask.bias + b * mask.bias_stride_b + head * mask.bias_stride_h
        at += row.to(tl.int64) * mask.bias_stride_q + column.to(tl.int64) * mask.bias_stride_k
        added = tl.load(at, visible, float("-inf")).to(tl.float32)
        scores += added
        visible &= added != float("-inf")
    return tl.where(visible, scores, float("-inf")), visible


@triton.jit
def softcapped(scores, cap):
    """Return cap * tanh(scores / cap) and that tanh; scores and cap have the same units."""
    x = scores / cap
    magnitude = tl.abs(x)
    square = x * x
    # tanh(x) / x - 1 over x^2, interpolated at Chebyshev nodes of x^2 in [0, 0.36]: error 1.1e-8.
    small = -0.006269119679927826 * square + 0.021110959351062775
    small = (small * square - 0.053873948752880096) * square + 0.13332915306091309
    small = x + x * square * (small * square - 0.3333333134651184)
    large = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    t = tl.where(magnitude < 0.6, small, tl.where(x < 0, -large, large))
    return cap * t, t
