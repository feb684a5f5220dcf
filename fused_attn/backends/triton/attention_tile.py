"""Device functions for one query tile and one KV block, shared by forward and backward.

The functions share these arguments:
    const       compile-time constants, see `KernelConstants`
    sequence    the sequence and head of the tile, and the mask bounds, see `masks.Sequence`
    keys        the keys and values of the tile, see `Keys`
    draws       dropout seed and counter offsets, see `dropout_counters`; None without dropout
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_attn.backends.triton.masks import (
    LOG2E,
    Sequence,
    add_alibi,
    apply_mask,
    bits_of,
    sequence_bounds,
    softcapped,
    tile_key_range,
)
from fused_attn.backends.triton.philox import keep_words
from fused_attn.backends.triton.tiles import key_tiles


class Rows(NamedTuple):
    """Address and strides, in elements, of a (batch, num_heads, seqlen, dim) tensor.

    The stride of the last dimension is 1.
    """

    data: Any
    stride_b: int
    stride_h: int
    stride_row: int


class Settings(NamedTuple):
    """Options of a call, which are the same for all tiles."""

    softmax_scale: float
    softcap: float
    dropout_threshold: int
    dropout_scale: float
    dropout_offsets: Any  # int64 (batch, 3): offsets of query, key and head; or None


class KernelConstants(NamedTuple):
    """Compile-time constants of a kernel. Each field is a tl.constexpr."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any  # HEAD_DIM, padded to a power of two
    BLOCK_DV: Any  # HEAD_DIM_V, padded to a power of two
    BLOCK_M: Any  # queries per tile
    BLOCK_N: Any  # keys per tile
    SOFTCAP: Any  # bool: scores are soft-capped
    NATURAL: Any  # bool: scores are in natural units, see `finish_scores`
    ACCURATE: Any  # bool: exp must be accurate to the last bits of float32
    PRECISION: Any  # input_precision of float32 matmuls: "ieee" or "tf32"
    PACKED_HEADS: Any  # bool: a tile has queries of several heads, and h has an element per row
    WHOLE_BLOCKS: Any  # bool: no KV block extends past the end of the bias


class Keys(NamedTuple):
    """Keys and values that a query tile reads."""

    key_at: Any  # address of the first key of the sequence and head
    value_at: Any  # address of the first value
    # Keys outside [begin, end) are not loaded, because the structural conditions mask them for all
    # queries of the tile.
    begin: Any
    end: Any


@triton.jit
def sequence_rows(cu_seqlens, b, seqlen):
    """Return the batch index, first row and number of rows of sequence b in a tensor.

    cu_seqlens is None if sequences are not packed. `seqlen` is then their length.
    """
    if cu_seqlens is None:
        return b, b * 0, b * 0 + seqlen
    else:
        first = tl.load(cu_seqlens + b)
        return b * 0, first, (tl.load(cu_seqlens + b + 1) - first).to(tl.int32)


@triton.jit
def head_rows(rows, batch, h, first):
    """Return the address of row `first` of a batch entry and head."""
    at = rows.data + batch.to(tl.int64) * rows.stride_b + h.to(tl.int64) * rows.stride_h
    return at + first.to(tl.int64) * rows.stride_row


@triton.jit
def keys_of_tile(
    key, value, cu_seqlens_k, mask, sizes, b, h, i_begin, seqlen_q, const: tl.constexpr
):
    """Return the Sequence and Keys of a query tile, and its KV block ranges from `key_tiles`."""
    h_kv = h // (sizes.num_heads // sizes.num_heads_kv)
    batch, first, seqlen_k = sequence_rows(cu_seqlens_k, b, sizes.seqlen_k)
    bounds = sequence_bounds(mask, sizes, b)
    i_end = tl.minimum(i_begin + const.BLOCK_M, seqlen_q)
    ranges = key_tiles(bounds, i_begin, i_end, sizes.seqlen_k, const.BLOCK_N)
    begin, end = tile_key_range(bounds, i_begin, i_end, seqlen_k)
    key_at, value_at = head_rows(key, batch, h_kv, first), head_rows(value, batch, h_kv, first)
    sequence = Sequence(b, h, seqlen_q, seqlen_k, bounds)
    return sequence, Keys(key_at, value_at, begin, end), ranges


@triton.jit
def load_tile(
    at, stride_row, first, inside,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the (BLOCK_ROWS, BLOCK_D) tile that starts at row `first`.

    Columns from DIM on and rows that are not `inside` are 0. If `inside` is None, all rows load.
    """
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    at = at + first.to(tl.int64) * stride_row + (row[:, None] * stride_row + column[None, :])
    if inside is None:
        if DIM == BLOCK_D:
            return tl.load(at)
        else:
            return tl.load(at, (column < DIM)[None, :], 0.0)
    else:
        if DIM == BLOCK_D:
            return tl.load(at, inside[:, None], 0.0)
        else:
            return tl.load(at, inside[:, None] & (column < DIM)[None, :], 0.0)


@triton.jit
def store_tile(
    at, stride_row, first, end, tile,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a tile to the rows that start at `first`. Rows from `end` on are skipped."""
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    at = at + first.to(tl.int64) * stride_row + (row[:, None] * stride_row + column[None, :])
    inside = (row + first < end)[:, None] & (column < DIM)[None, :]
    tl.store(at, tile.to(at.dtype.element_ty), inside)


@triton.jit
def load_key_value(keys, key, value, j_begin, j, const: tl.constexpr, PARTIAL: tl.constexpr):
    """Load a KV block. If PARTIAL, keys and values outside [keys.begin, keys.end) are 0."""
    in_range = (j >= keys.begin) & (j < keys.end) if PARTIAL else None
    k = load_tile(
        keys.key_at, key.stride_row, j_begin, in_range, const.HEAD_DIM, const.BLOCK_N, const.BLOCK_D
    )
    v = load_tile(
        keys.value_at, value.stride_row, j_begin, in_range,
        const.HEAD_DIM_V, const.BLOCK_N, const.BLOCK_DV,
    )  # fmt: skip
    return k, v


@triton.jit
def finish_scores(
    products, i, j, loaded, sequence, mask, settings,
    const: tl.constexpr, PARTIAL: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Apply scale, softcap, ALiBi, bias and mask to QK^T.

    Returns the scores, their visibility, and the tanh of softcap, which is 0 at masked scores.
    Without softcap, the tanh is a placeholder. All scores are visible unless PARTIAL.

    Scores are in natural units with bias, ALiBi or softcap, and if the rounding error of
    scale * log2(e) would matter (ACCURATE). Otherwise they are in units of ln(2), which folds
    log2(e) into the multiplication by scale.
    """
    if const.SOFTCAP:
        scores, cap_tanh = softcapped(products * settings.softmax_scale, settings.softcap)
    elif const.NATURAL:
        scores, cap_tanh = products * settings.softmax_scale, products
    else:
        scores, cap_tanh = products * (settings.softmax_scale * LOG2E), products
    scores = add_alibi(scores, i, j, sequence, mask, const, KEYS_FIRST)
    if PARTIAL:
        scores, visible = apply_mask(scores, i, j, loaded, sequence, mask, const, KEYS_FIRST)
        return scores, visible, tl.where(visible, cap_tanh, 0.0)
    else:
        return scores, scores == scores, cap_tanh


@triton.jit
def power(difference, const: tl.constexpr):
    """Return the weight of a score minus the maximum, both in the units of `finish_scores`."""
    if const.ACCURATE:
        # exp2(x * log2(e)) rounds its argument. At x = -8, the relative error of the result is
        # 5e-7. It has the same sign for all keys if scores are equal. Instead, decompose
        # x = whole * ln(2) + rest, with ln(2) split into a 10-bit constant and a small correction
        # (Cody and Waite 1980). exp(-150) is 0.
        x = tl.where(difference < -150.0, -150.0, difference)
        whole = tl.floor(x * LOG2E + 0.5)
        rest = (x - whole * 0.693359375) - whole * -2.12194440e-4
        return tl.exp2(rest * LOG2E) * tl.exp2(whole)
    else:
        return tl.exp2(difference * LOG2E if const.NATURAL else difference)


@triton.jit
def dropout_counters(seed, settings, sizes, b):
    """Return the dropout seed, and the offsets of the Philox counters of sequence b.

    The offsets are the first octet of keys, the first query and the first head.
    """
    if settings.dropout_offsets is None:
        return seed, b * 0, b * 0, b * sizes.num_heads
    else:
        at = settings.dropout_offsets + b * 3
        octet, head = (tl.load(at + 1) // 8).to(tl.int32), tl.load(at + 2).to(tl.int32)
        return seed, octet, tl.load(at).to(tl.int32), head


@triton.jit
def dropout_keep(
    draws, i, j_begin, sequence, settings, const: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Return a bool tile, True where dropout keeps the weight.

    i contains the query of each row. j_begin is the key of the first column, a multiple of 8. Bits
    are drawn as words, because a tile of octets would not have the register layout of a matmul.
    """
    seed, first_octet, first_query, first_head = draws
    width: tl.constexpr = min(const.BLOCK_N, 64)
    octet = first_octet + j_begin // 8 + tl.arange(0, width // 8)[None, :]
    head = first_head + sequence.h
    if const.PACKED_HEADS:
        head = head[:, None]
    query = first_query + i[:, None]
    words = keep_words(seed, query, octet, head, 0, settings.dropout_threshold)
    next_words = words
    if const.BLOCK_N > 64:
        next_words = keep_words(seed, query, octet + 8, head, 0, settings.dropout_threshold)
    return bits_of(words, next_words, tl.arange(0, const.BLOCK_N), const, KEYS_FIRST)


@triton.jit
def hides_values(mask):
    """Return True if the mask may hide loaded keys. Keys outside of bounds are never loaded."""
    return (
        mask.query_documents is not None
        or mask.key_mask is not None
        or mask.words is not None
        or mask.bias is not None
    )


@triton.jit
def any_nan(tile):
    """Return True if a tile has a NaN."""
    # Reduce both dimensions at once. On sm_100, Triton 3.6 and 3.7 cannot compile two successive
    # reductions of a matmul's result.
    return tl.max((tile != tile).to(tl.int32)) != 0


@triton.jit
def zero_fully_masked(tile, visible):
    """Zero the keys or values that are masked for all queries of the tile, as 0 * NaN is NaN."""
    any_visible = tl.max(visible.to(tl.int32), 0)
    return tl.where((any_visible != 0)[:, None], tile, 0.0)
