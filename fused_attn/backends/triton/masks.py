"""Masks in kernels: the visibility of the scores of a tile, and the terms added to them.

The structural conditions (band, key range, prefix) reduce to one interval [lo(i), hi(i)) of visible
keys per query i. Each score therefore needs only two comparisons. Positions are int32, because they
are below `fused_attn.masks.UNLIMITED`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


class MaskArgs(NamedTuple):
    """Tensors of a MaskSpec, or None, and their strides. A stride of 0 broadcasts."""

    bounds: Any  # int64 (batch, 8), with the columns of masks.spec.BOUNDS
    query_documents: Any  # int64 (batch, seqlen_q)
    query_documents_stride_b: int
    key_documents: Any  # int64 (batch, seqlen_k)
    key_documents_stride_b: int
    slopes: Any  # float32 (batch, num_heads)
    slopes_stride_b: int
    slopes_stride_h: int
    key_mask: Any  # uint8 (batch, num_heads, 1, seqlen_k)
    key_mask_stride_b: int
    key_mask_stride_h: int
    key_mask_stride_k: int
    words: Any  # int64 (batch, num_heads, words, seqlen_q), see `tiles.pack_words_kernel`
    words_stride_b: int
    words_stride_h: int
    words_stride_w: int
    bias: Any  # floating point (batch, num_heads, seqlen_q, seqlen_k)
    bias_stride_b: int
    bias_stride_h: int
    bias_stride_q: int
    bias_stride_k: int


class NoMask(NamedTuple):
    """Replacement of MaskArgs if there is no mask. Each field costs a microsecond per launch."""

    bounds: Any = None
    query_documents: Any = None
    key_documents: Any = None
    slopes: Any = None
    key_mask: Any = None
    words: Any = None
    bias: Any = None


class Sizes(NamedTuple):
    """Integers that change from call to call.

    Kernels have a separate argument for each, with do_not_specialize. Triton specializes integers
    in a tuple, and would recompile if one becomes 1, or starts or stops being a multiple of 16.
    """

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int  # maximum number of queries of a sequence
    seqlen_k: int  # maximum number of keys of a sequence
    total_q: int  # query rows per batch entry and head in lse
    band_lo: int
    band_hi: int
    alibi_offset: int


SIZES = list(Sizes._fields)


class Bounds(NamedTuple):
    """Bounds of one sequence, as int32; see SequenceBounds in csrc/params.h."""

    key_begin: Any
    key_end: Any
    query_begin: Any
    query_end: Any
    band_lo: Any
    band_hi: Any
    prefix_end: Any
    alibi_offset: Any


class Sequence(NamedTuple):
    """Sequence and head of a tile. With PACKED_HEADS, h holds the head of each row of the tile."""

    b: Any
    h: Any
    seqlen_q: Any
    seqlen_k: Any
    bounds: Any  # Bounds


@triton.jit
def sequence_bounds(mask, sizes, b):
    """Return the Bounds of sequence b in the form that `visible_keys` requires.

    If the band fully masks rows, key_end is reduced. csrc/block_ranges.h explains why.
    """
    at = stored_bounds(mask, sizes, b)
    key_end = tl.where(at.band_lo > at.band_hi, at.key_begin, at.key_end)
    # As j >= i + band_lo > i, the prefix condition j <= i never holds. Only j < prefix_end remains.
    beyond = (at.band_lo > 0) & (at.prefix_end > 0)
    key_end = tl.where(beyond, tl.minimum(key_end, at.prefix_end), key_end)
    prefix_end = tl.where(beyond, 0, at.prefix_end)
    return Bounds(
        at.key_begin, key_end, at.query_begin, at.query_end, at.band_lo, at.band_hi, prefix_end,
        at.alibi_offset,
    )  # fmt: skip


@triton.jit
def stored_bounds(mask, sizes, b):
    """Return the Bounds of sequence b as stored in MaskSpec."""
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
    """Return the range [lo, hi) of queries that the structural conditions let attend to key j.

    This is the inverse of `visible_keys`, limited to the query range.
    """
    prefix_end = bounds.prefix_end
    lo = tl.maximum(bounds.query_begin, j - bounds.band_hi)
    lo = tl.where((prefix_end == 0) | (j < prefix_end), lo, tl.maximum(lo, j))
    hi = tl.minimum(bounds.query_end, j - bounds.band_lo + 1)
    return lo, tl.where((j >= bounds.key_begin) & (j < bounds.key_end), hi, lo)


@triton.jit
def tile_key_range(bounds, i_begin, i_end, seqlen_k):
    """Return the range of keys structurally visible to any of the queries [i_begin, i_end).

    Kernels do not load other keys.
    """
    begin, _ = visible_keys(bounds, tl.maximum(i_begin, bounds.query_begin))
    _, end = visible_keys(bounds, tl.minimum(i_end, bounds.query_end) - 1)
    return begin, tl.minimum(end, seqlen_k)


@triton.jit
def across(vector, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Expand a vector to broadcast over a tile, which is (keys, queries) if KEYS_FIRST.

    The vector has one element per key if KEYS, otherwise one per query.
    """
    return vector[:, None] if KEYS == KEYS_FIRST else vector[None, :]


@triton.jit
def add_alibi(scores, i, j, sequence, mask, const: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return the scores with ALiBi added, if the mask has slopes. Scores are in natural units."""
    if mask.slopes is not None:
        at = sequence.b * mask.slopes_stride_b + sequence.h * mask.slopes_stride_h
        slope = tl.load(mask.slopes + at)
        if const.PACKED_HEADS:
            slope = slope[:, None]
        position = across(i + sequence.bounds.alibi_offset, False, KEYS_FIRST)
        distance = tl.abs(position - across(j, True, KEYS_FIRST))
        return scores - slope * distance.to(tl.float32)
    else:
        return scores


class LoadedMask(NamedTuple):
    """Parts of a mask that a tile reads. Fields that the mask does not have are placeholders."""

    query_ids: Any
    key_ids: Any
    key_visible: Any
    words: Any  # bits of the first 64 keys of the tile, for each query
    next_words: Any  # bits of the next 64 keys
    bias: Any


@triton.jit
def load_mask(
    i, j, j_begin, sequence, mask,
    const: tl.constexpr, PARTIAL: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Load the parts of the mask that a partial tile needs.

    Call this before the matmul of the scores. The loads then overlap with it, and Triton gives the
    scores the layout of the matmul. Loading a tile after the matmul would impose another layout
    and convert the scores several times.
    """
    b, h = sequence.b.to(tl.int64), sequence.h.to(tl.int64)  # offsets may exceed int32
    query_ids, key_ids, key_visible, words, next_words, bias = i, j, j, i, i, i
    if PARTIAL:
        in_q, in_k = i < sequence.seqlen_q, j < sequence.seqlen_k
        head = h[:, None] if const.PACKED_HEADS else h
        row, column = across(i, False, KEYS_FIRST), across(j, True, KEYS_FIRST)
        if mask.query_documents is not None:
            query_at = mask.query_documents + b * mask.query_documents_stride_b + i
            key_at = mask.key_documents + b * mask.key_documents_stride_b + j
            query_ids = tl.load(query_at, in_q, 0).to(tl.int32)
            key_ids = tl.load(key_at, in_k, 0).to(tl.int32)
        if mask.key_mask is not None:
            at = mask.key_mask + b * mask.key_mask_stride_b + head * mask.key_mask_stride_h
            if const.PACKED_HEADS:
                at += column.to(tl.int64) * mask.key_mask_stride_k
                key_visible = tl.load(at, in_q[:, None] & in_k[None, :], 0)
            else:
                key_visible = tl.load(at + j.to(tl.int64) * mask.key_mask_stride_k, in_k, 0)
        if mask.words is not None:
            at = mask.words + b * mask.words_stride_b + h * mask.words_stride_h + i
            w = j_begin // 64
            words = tl.load(at + w.to(tl.int64) * mask.words_stride_w, in_q, 0)
            if const.BLOCK_N > 64:
                more = in_q & (j_begin + 64 < sequence.seqlen_k)
                next_words = tl.load(at + (w + 1).to(tl.int64) * mask.words_stride_w, more, 0)
        if mask.bias is not None:
            at = mask.bias + b * mask.bias_stride_b + head * mask.bias_stride_h
            at += row.to(tl.int64) * mask.bias_stride_q + column.to(tl.int64) * mask.bias_stride_k
            inside = across(in_q, False, KEYS_FIRST)
            if not const.WHOLE_BLOCKS:  # a condition on each key would make the loads narrow
                inside = inside & across(in_k, True, KEYS_FIRST)
            bias = tl.load(at, inside, 0.0)
    return LoadedMask(query_ids, key_ids, key_visible, words, next_words, bias)


@triton.jit
def bits_of(words, next_words, bit, const: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Unpack words, one per query, into a bool tile.

    Args:
        bit: (BLOCK_N,), for each key of the tile, the index of its bit. Bits from 64 on are in
            next_words.
    """
    spread = across(words, False, KEYS_FIRST)
    if const.BLOCK_N > 64:
        first = across(bit < 64, True, KEYS_FIRST)
        spread = tl.where(first, spread, across(next_words, False, KEYS_FIRST))
    return ((spread >> across((bit % 64).to(tl.int64), True, KEYS_FIRST)) & 1) != 0


@triton.jit
def apply_mask(scores, i, j, loaded, sequence, mask, const: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Add the bias to the scores of a partial tile and mask them; return scores and visibility.

    Masked scores become -inf, even if they were NaN. Vectors are loaded as vectors and then
    broadcast, because a thread would load a (rows, 1) tensor once per column that it holds.

    KEYS_FIRST: the tile is (keys, queries). A thread then holds few keys and many queries, so
    one interval of queries per key takes fewer registers than one interval of keys per query.
    """
    bounds = sequence.bounds
    row, column = across(i, False, KEYS_FIRST), across(j, True, KEYS_FIRST)
    if KEYS_FIRST:
        lo, hi = visible_queries(bounds, j)
        visible = (row >= across(lo, True, True)) & (row < across(hi, True, True))
    else:
        lo, hi = visible_keys(bounds, i)
        hi = tl.where((i >= bounds.query_begin) & (i < bounds.query_end), hi, lo)
        visible = (column >= across(lo, False, False)) & (column < across(hi, False, False))
    if mask.query_documents is not None:
        query_ids = across(loaded.query_ids, False, KEYS_FIRST)
        visible &= query_ids == across(loaded.key_ids, True, KEYS_FIRST)
    if mask.key_mask is not None:
        if const.PACKED_HEADS:
            visible &= loaded.key_visible != 0
        else:
            visible &= across(loaded.key_visible != 0, True, KEYS_FIRST)
    if mask.words is not None:
        bit = j % (64 if const.BLOCK_N <= 64 else const.BLOCK_N)
        visible &= bits_of(loaded.words, loaded.next_words, bit, const, KEYS_FIRST)
    if mask.bias is not None:
        added = loaded.bias.to(tl.float32)
        scores += added
        visible &= added != float("-inf")
    return tl.where(visible, scores, float("-inf")), visible


@triton.jit
def softcapped(scores, cap):
    """Return cap * tanh(scores / cap), and the tanh. The scores and cap have the same units."""
    x = scores / cap
    magnitude = tl.abs(x)
    square = x * x
    # (tanh(x) / x - 1) / x^2 as a polynomial in x^2, interpolated at Chebyshev nodes in [0, 0.36].
    # The error is 1.1e-8.
    small = -0.006269119679927826 * square + 0.021110959351062775
    small = (small * square - 0.053873948752880096) * square + 0.13332915306091309
    small = x + x * square * (small * square - 0.3333333134651184)
    large = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    t = tl.where(magnitude < 0.6, small, tl.where(x < 0, -large, large))
    return cap * t, t
