"""Attention weights, computed on request by a second pass over query, key and lse.

Each program computes a tile of the result. It averages heads in registers, without materializing a
(batch, num_heads, seqlen_q, seqlen_k) tensor.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from fused_attn.backends.triton.attention_tile import (
    dropout_counters,
    dropout_keep,
    finish_scores,
    head_rows,
    keys_of_tile,
    load_tile,
    power,
)
from fused_attn.backends.triton.backward import lse_in_units, statistics_at
from fused_attn.backends.triton.masks import SIZES, Sizes, load_mask
from fused_attn.backends.triton.tiles import SKIP


@triton.jit(do_not_specialize=SIZES)
def attention_weights_kernel(
    query, key, lse, lse_residual, weights, seed, mask, kinds, kinds_heads,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    settings, const: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the weights after dropout.

    weights: contiguous (batch, num_heads, seqlen_q, seqlen_k), or (batch, seqlen_q, seqlen_k) if
    AVERAGE.
    """
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m, num_n = tl.cdiv(seqlen_q, const.BLOCK_M), tl.cdiv(seqlen_k, const.BLOCK_N)
    heads = sizes.num_heads if AVERAGE else 1
    pid = tl.program_id(0)
    n, rest = pid % num_n, pid // num_n
    m, own = rest % num_m, rest // num_m
    i_begin, j_begin = m * const.BLOCK_M, n * const.BLOCK_N
    if seed is not None:
        seed = tl.load(seed)
    total = tl.zeros((const.BLOCK_M, const.BLOCK_N), tl.float32)
    for g in range(heads):
        b, h = (own * heads + g) // sizes.num_heads, (own * heads + g) % sizes.num_heads
        at = ((b.to(tl.int64) * kinds_heads + h % kinds_heads) * num_m + m) * num_n + n
        if tl.load(kinds + at) != SKIP:
            total += _tile_of_head(
                query,
                key,
                lse,
                lse_residual,
                seed,
                mask,
                sizes,
                settings,
                b,
                h,
                i_begin,
                j_begin,
                const,
            )
    if AVERAGE:
        total /= sizes.num_heads
    i, j = i_begin + tl.arange(0, const.BLOCK_M), j_begin + tl.arange(0, const.BLOCK_N)
    at = weights + own.to(tl.int64) * sizes.seqlen_q * sizes.seqlen_k
    at += i.to(tl.int64)[:, None] * sizes.seqlen_k + j[None, :]
    inside = (i < sizes.seqlen_q)[:, None] & (j < sizes.seqlen_k)[None, :]
    tl.store(at, total.to(weights.dtype.element_ty), inside)


@triton.jit
def _tile_of_head(
    query, key, lse, lse_residual, seed, mask, sizes, settings, b, h, i_begin, j_begin,
    const: tl.constexpr,
):  # fmt: skip
    """Return the weights of one tile of a head, after dropout."""
    draws = None
    if seed is not None:
        draws = dropout_counters(seed, settings, sizes, b)
    seqlen_q = b * 0 + sizes.seqlen_q
    sequence, keys, _ = keys_of_tile(key, key, None, mask, sizes, b, h, i_begin, seqlen_q, const)
    i, j = i_begin + tl.arange(0, const.BLOCK_M), j_begin + tl.arange(0, const.BLOCK_N)
    inside = i < seqlen_q
    q = load_tile(
        head_rows(query, b, h, b * 0), query.stride_row, i_begin, inside,
        const.HEAD_DIM, const.BLOCK_M, const.BLOCK_D,
    )  # fmt: skip
    k = load_tile(
        keys.key_at, key.stride_row, j_begin, (j >= keys.begin) & (j < keys.end),
        const.HEAD_DIM, const.BLOCK_N, const.BLOCK_D,
    )  # fmt: skip
    at = statistics_at(sizes, b, h, b * 0) + i
    log_sum, lse_factor = lse_in_units(lse, lse_residual, at, inside, const)
    loaded = load_mask(i, j, j_begin, sequence, mask, const, True, False)
    products = tl.dot(q, tl.trans(k), input_precision=const.PRECISION)
    scores, visible, _ = finish_scores(
        products, i, j, loaded, sequence, mask, settings, const, True, False
    )
    weights = power(scores - log_sum[:, None], const) * lse_factor[:, None]
    if draws is not None:
        keep = dropout_keep(draws, i, j_begin, sequence, settings, const, False)
        weights = tl.where(keep, weights * settings.dropout_scale, 0.0)
    return tl.where(visible, weights, 0.0)
