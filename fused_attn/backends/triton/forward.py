"""Attention forward: online softmax over the visible KV blocks of a query tile.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023,
"FlashAttention-2".
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from fused_attn.backends.triton.attention_tile import (
    any_nan,
    dropout_counters,
    dropout_keep,
    finish_scores,
    head_rows,
    hides_values,
    keys_of_tile,
    load_key_value,
    load_tile,
    power,
    sequence_rows,
    store_tile,
    zero_fully_masked,
)
from fused_attn.backends.triton.masks import LN2, SIZES, Sizes, load_mask
from fused_attn.backends.triton.tiles import any_tile, full_tile, partial_tile, visible_tiles


@triton.jit(do_not_specialize=SIZES)
def attention_fwd_kernel(
    query, key, value, out, lse, lse_residual, out_residual, seed, cu_seqlens_q, cu_seqlens_k,
    mask, lists,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    settings, const: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Compute out, lse, and their residuals unless None, for BLOCK_M queries of a head.

    ROUNDED: divide by the row sums of the weights rounded for the PV matmul, as the backward needs
    for 16-bit types.
    """
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m, num_n = tl.cdiv(seqlen_q, const.BLOCK_M), tl.cdiv(seqlen_k, const.BLOCK_N)
    pid = tl.program_id(0)
    # Process the last query tiles first, because they take longest under a causal mask.
    m, bh = num_m - 1 - pid % num_m, pid // num_m
    b, h = bh // sizes.num_heads, bh % sizes.num_heads
    query_batch, query_first, seqlen_q = sequence_rows(cu_seqlens_q, b, sizes.seqlen_q)
    i_begin = m * const.BLOCK_M
    if i_begin >= seqlen_q:
        return
    sequence, keys, ranges = keys_of_tile(
        key, value, cu_seqlens_k, mask, sizes, b, h, i_begin, seqlen_q, const
    )
    tiles = visible_tiles(ranges, lists, b, h, m, num_m, num_n)

    i = i_begin + tl.arange(0, const.BLOCK_M)
    q = load_tile(
        head_rows(query, query_batch, h, query_first), query.stride_row, i_begin, i < seqlen_q,
        const.HEAD_DIM, const.BLOCK_M, const.BLOCK_D,
    )  # fmt: skip
    draws = None
    if seed is not None:
        draws = dropout_counters(tl.load(seed), settings, sizes, b)
    acc, maximum, total, multiplied = attend(
        q, i, tiles, lists, keys, sequence, key, value, draws, mask, settings, const, ROUNDED
    )
    empty = total == 0.0
    # The row sums of the backward require that the weights add up to 1 after rounding to 16 bits.
    # In a row that one key dominates, a sum of 1.002 would hide the contributions of other keys.
    divisor = tl.where(total == total, multiplied, total) if ROUNDED else total
    scale = settings.dropout_scale / tl.where(empty, 1.0, divisor)
    acc = tl.where(empty[:, None], 0.0, acc * scale[:, None])
    store_tile(
        head_rows(out, query_batch, h, query_first), out.stride_row, i_begin, seqlen_q, acc,
        const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
    )  # fmt: skip
    if out_residual is not None:
        rounded = acc.to(q.dtype).to(tl.float32)
        lost = acc.to(tl.int32, bitcast=True) - rounded.to(tl.int32, bitcast=True)
        lost = tl.minimum(tl.maximum(lost, -0x7FFF), 0x7FFF)
        store_tile(
            head_rows(out_residual, query_batch, h, query_first), out_residual.stride_row, i_begin,
            seqlen_q, lost, const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
        )  # fmt: skip
    at = (query_batch.to(tl.int64) * sizes.num_heads + h) * sizes.total_q + query_first
    store_lse(lse, lse_residual, at + i, i < seqlen_q, maximum, total, const)


@triton.jit
def store_lse(lse, lse_residual, at, inside, maximum, total, const: tl.constexpr):
    """Store lse in natural units, and its rounding residual unless lse_residual is None."""
    scaled = maximum.to(tl.float64) * (1.0 if const.NATURAL else LN2)
    log = tl.log(total.to(tl.float64))
    empty = total == 0.0
    high = tl.where(empty, float("-inf"), scaled + log).to(tl.float32)
    tl.store(lse + at, high, inside)
    if lse_residual is not None:
        # Subtract before adding log: near float32's lowest value, scaled + log would lose log.
        low = tl.where(empty, 0.0, (scaled - high.to(tl.float64)) + log)
        tl.store(lse_residual + at, low.to(tl.float32), inside)


@triton.jit
def attend(
    q, i, tiles, lists, keys, sequence, key, value, draws, mask, settings,
    const: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Return the weighted values, the row maxima, the row sums and `multiplied` of a query tile.

    A value that is masked for all queries of a tile must have no effect, even if it is NaN. So if
    any result is NaN, the tiles are computed again with such values set to 0. Doing this for every
    tile would move values through registers and need a maximum over the queries of each tile.
    """
    acc, maximum, total, multiplied = _no_tiles(const)
    n = full_tile(0, tiles, lists)
    for t in tl.range(0, tiles[0]):
        following = full_tile(t + 1, tiles, lists)
        acc, maximum, total, multiplied = _fwd_tile(
            acc, maximum, total, multiplied, q, i, n * const.BLOCK_N, keys, sequence, key, value,
            draws, mask, settings, const, False, ROUNDED, False,
        )  # fmt: skip
        n = following
    n = partial_tile(0, tiles, lists)
    for t in tl.range(0, tiles[1]):
        following = partial_tile(t + 1, tiles, lists)
        acc, maximum, total, multiplied = _fwd_tile(
            acc, maximum, total, multiplied, q, i, n * const.BLOCK_N, keys, sequence, key, value,
            draws, mask, settings, const, True, ROUNDED, False,
        )  # fmt: skip
        n = following
    if hides_values(mask):  # noqa: SIM102 - known when the kernel is compiled
        if any_nan(acc):
            acc, maximum, total, multiplied = _no_tiles(const)
            for t in tl.range(0, tiles[0] + tiles[1], num_stages=1):
                n = any_tile(t, tiles, lists)
                acc, maximum, total, multiplied = _fwd_tile(
                    acc, maximum, total, multiplied, q, i, n * const.BLOCK_N, keys, sequence, key,
                    value, draws, mask, settings, const, True, ROUNDED, True,
                )  # fmt: skip
    return acc, maximum, total, multiplied


@triton.jit
def _no_tiles(const: tl.constexpr):
    """Return the results of `attend` for no tiles."""
    zeros = tl.zeros((const.BLOCK_M,), tl.float32)
    acc = tl.zeros((const.BLOCK_M, const.BLOCK_DV), tl.float32)
    return acc, tl.full((const.BLOCK_M,), float("-inf"), tl.float32), zeros, zeros


@triton.jit
def _fwd_tile(
    acc, maximum, total, multiplied, q, i, j_begin, keys, sequence, key, value, draws, mask,
    settings, const: tl.constexpr, PARTIAL: tl.constexpr, ROUNDED: tl.constexpr,
    ZEROED: tl.constexpr,
):  # fmt: skip
    """Accumulate one KV block into acc, the row maxima and the row sums of the weights.

    If ROUNDED, also accumulate `multiplied`, the row sums of the weights rounded for the PV matmul.
    """
    j = j_begin + tl.arange(0, const.BLOCK_N)
    k, v = load_key_value(keys, key, value, j_begin, j, const, PARTIAL)
    loaded = load_mask(i, j, j_begin, sequence, mask, const, PARTIAL, False)
    products = tl.dot(q, tl.trans(k), input_precision=const.PRECISION)
    scores, visible, _ = finish_scores(
        products, i, j, loaded, sequence, mask, settings, const, PARTIAL, False
    )
    largest = tl.maximum(maximum, tl.max(scores, 1))
    # Rows without a visible key so far would compute -inf - -inf, which is NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest) if PARTIAL else largest
    weights = power(scores - shift[:, None], const)
    rescale = power(maximum - shift, const)
    total = total * rescale + tl.sum(weights, 1)
    if ROUNDED:
        weights = _rounded(weights, v.dtype)
        multiplied = multiplied * rescale + tl.sum(weights, 1)
    if draws is not None:
        keep = dropout_keep(draws, i, j_begin, sequence, settings, const, False)
        weights = tl.where(keep, weights, 0.0)
    if ZEROED:
        v = zero_fully_masked(v, visible)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=const.PRECISION)
    return acc, largest, total, multiplied


@triton.jit
def _rounded(weights, dtype: tl.constexpr):
    """Return weights, between 0 and 1, rounded to the mantissa of a 16-bit type; ties away from 0.

    NaN becomes any number. Conversions to the type and back run at a quarter of the rate of these
    integer operations, on the unit that computes exp2.
    """
    dropped: tl.constexpr = 16 if dtype == tl.bfloat16 else 13
    bits = weights.to(tl.int32, bitcast=True) + (1 << (dropped - 1))
    return (bits & -(1 << dropped)).to(tl.float32, bitcast=True)
