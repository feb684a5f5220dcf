"""Attention backward, which recomputes the scores tile by tile from query, key and lse.

With P = exp(S - lse), Z the dropout mask (1: kept, 0: dropped), c = dropout_scale(dropout_p) and
delta = rowsum(dO * O):
  dV = c (P Z)^T dO,  dS = P (c Z (dO V^T) - delta + dlse),  dK = scale dS^T Q,  dQ = scale dS K.
(Dao et al. 2022, FlashAttention, appendix B.4; delta as in FlashAttention-2, section 3.1.)

One kernel computes dQ for each query tile. Another computes dK and dV for each KV block. Neither
uses atomic additions, so results are deterministic. Both kernels compute the scores and dP, and
need 7 matmuls per tile in total. A single kernel with atomic additions would need 5.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

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
from fused_attn.backends.triton.masks import (
    LOG2E,
    SIZES,
    Sequence,
    Sizes,
    load_mask,
    sequence_bounds,
)
from fused_attn.backends.triton.tiles import (
    any_tile,
    full_tile,
    partial_tile,
    query_tiles,
    visible_tiles,
)


class RowStatistics(NamedTuple):
    """Per-query statistics for the backward, float32 (batch, num_heads, total_q)."""

    lse: Any  # in the units of scores; inf for fully masked rows, which makes their P 0
    # exp of the rounding error of lse. The weights are multiplied by it, because the error would be
    # rounded off again if it were subtracted from the scores. None where the error is negligible:
    # for 16-bit types without bias, ALiBi and softcap.
    lse_factor: Any
    delta: Any  # rowsum(dO * O)
    grad_lse: Any  # None if lse has no gradient


@triton.jit(do_not_specialize=SIZES)
def row_statistics_kernel(
    out, out_residual, grad_out, lse, lse_residual, stats, cu_seqlens_q,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    const: tl.constexpr,
):  # fmt: skip
    """Compute RowStatistics, except grad_lse, for BLOCK_M queries of a head."""
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m = tl.cdiv(seqlen_q, const.BLOCK_M)
    pid = tl.program_id(0)
    m, bh = pid % num_m, pid // num_m
    b, h = bh // sizes.num_heads, bh % sizes.num_heads
    batch, first, seqlen_q = sequence_rows(cu_seqlens_q, b, sizes.seqlen_q)
    i_begin = m * const.BLOCK_M
    if i_begin >= seqlen_q:
        return
    i = i_begin + tl.arange(0, const.BLOCK_M)
    inside = i < seqlen_q
    at = statistics_at(sizes, batch, h, first) + i
    rounded, factor = lse_in_units(lse, lse_residual, at, inside, const)
    has_keys = rounded != float("inf")
    tl.store(stats.lse + at, rounded, inside)
    if stats.lse_factor is not None:
        tl.store(stats.lse_factor + at, factor, inside)
    o = load_tile(
        head_rows(out, batch, h, first), out.stride_row, i_begin, inside,
        const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
    )  # fmt: skip
    do = load_tile(
        head_rows(grad_out, batch, h, first), grad_out.stride_row, i_begin, inside,
        const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
    )  # fmt: skip
    o = o.to(tl.float32)
    if out_residual is not None:
        # In a row with few visible keys, or with one key that has nearly all the weight, the
        # rounding residual of out exceeds dS.
        low = load_tile(
            head_rows(out_residual, batch, h, first), out_residual.stride_row, i_begin, inside,
            const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
        )  # fmt: skip
        o = (o.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    products = tl.where(has_keys[:, None], o * do.to(tl.float32), 0.0)
    tl.store(stats.delta + at, tl.sum(products, 1), inside)


@triton.jit
def lse_in_units(lse, lse_residual, at, inside, const: tl.constexpr):
    """Return RowStatistics.lse and lse_factor, from lse in natural units and its residual."""
    unit = 1.0 if const.NATURAL else LOG2E
    high = tl.load(lse + at, inside, float("-inf")).to(tl.float64)
    has_keys = high != float("-inf")
    high *= unit
    residual = tl.load(lse_residual + at, inside, 0.0).to(tl.float64) * unit
    rounded = tl.where(has_keys, high + residual, float("inf")).to(tl.float32)
    # Subtract in two steps: if high is near float32's lowest value, high + residual loses residual.
    lost = tl.where(has_keys, (rounded.to(tl.float64) - high) - residual, 0.0)
    return rounded, power(lost.to(tl.float32), const)


@triton.jit(do_not_specialize=SIZES)
def attention_bwd_dq_kernel(
    query, key, value, grad_out, grad_query, seed, cu_seqlens_q, cu_seqlens_k,
    mask, lists,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    settings, stats, const: tl.constexpr, CONSISTENT: tl.constexpr,
):  # fmt: skip
    """Compute dQ for BLOCK_M queries of a head.

    CONSISTENT: also correct delta for the gradient of a float mask. In exact arithmetic, each row
    of dS adds up to dlse. The rounding of out changes this sum, which would affect the gradient of
    the mask. The correction restores the sum. Rows of a partial result do not add up to dlse.
    """
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m, num_n = tl.cdiv(seqlen_q, const.BLOCK_M), tl.cdiv(seqlen_k, const.BLOCK_N)
    pid = tl.program_id(0)
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
    at = statistics_at(sizes, query_batch, h, query_first)
    q, do, statistics = load_queries(
        query, grad_out, stats, at, query_batch, h, query_first, i_begin, i, seqlen_q, const
    )
    draws = None
    if seed is not None:
        draws = dropout_counters(tl.load(seed), settings, sizes, b)
    dq = tl.zeros((const.BLOCK_M, const.BLOCK_D), tl.float32)
    excess = tl.zeros((const.BLOCK_M,), tl.float32)
    total = tl.zeros((const.BLOCK_M,), tl.float32)
    n = full_tile(0, tiles, lists)
    for t in tl.range(0, tiles[0]):
        following = full_tile(t + 1, tiles, lists)
        dq, excess, total = _dq_tile(
            dq, excess, total, q, do, statistics, i, n * const.BLOCK_N, keys, sequence, key, value,
            draws, mask, settings, stats, const, CONSISTENT, False, False,
        )  # fmt: skip
        n = following
    n = partial_tile(0, tiles, lists)
    for t in tl.range(0, tiles[1]):
        following = partial_tile(t + 1, tiles, lists)
        dq, excess, total = _dq_tile(
            dq, excess, total, q, do, statistics, i, n * const.BLOCK_N, keys, sequence, key, value,
            draws, mask, settings, stats, const, CONSISTENT, True, False,
        )  # fmt: skip
        n = following
    if hides_values(mask):  # noqa: SIM102 - known when the kernel is compiled
        if any_nan(dq):  # see `forward.attend`
            dq = tl.zeros((const.BLOCK_M, const.BLOCK_D), tl.float32)
            excess = tl.zeros((const.BLOCK_M,), tl.float32)
            total = tl.zeros((const.BLOCK_M,), tl.float32)
            for t in tl.range(0, tiles[0] + tiles[1], num_stages=1):
                n = any_tile(t, tiles, lists)
                dq, excess, total = _dq_tile(
                    dq, excess, total, q, do, statistics, i, n * const.BLOCK_N, keys, sequence, key,
                    value, draws, mask, settings, stats, const, CONSISTENT, True, True,
                )  # fmt: skip
    store_tile(
        head_rows(grad_query, query_batch, h, query_first), grad_query.stride_row, i_begin,
        seqlen_q, dq * settings.softmax_scale, const.HEAD_DIM, const.BLOCK_M, const.BLOCK_D,
    )  # fmt: skip
    if CONSISTENT:
        if stats.grad_lse is not None:
            excess -= statistics[3]
        error = tl.where(total == 0.0, 0.0, excess / tl.where(total == 0.0, 1.0, total))
        tl.store(stats.delta + at + i, statistics[2] + error, i < seqlen_q)


@triton.jit
def _dq_tile(
    dq, excess, total, q, do, statistics, i, j_begin, keys, sequence, key, value, draws, mask,
    settings, stats, const: tl.constexpr, CONSISTENT: tl.constexpr, PARTIAL: tl.constexpr,
    ZEROED: tl.constexpr,
):  # fmt: skip
    """Accumulate one KV block into dQ and the row sums of dS and P."""
    grads, weights, cap_tanh, k = grad_scores(
        q, do, statistics, i, j_begin, keys, sequence, key, value, draws, mask, settings,
        stats, const, PARTIAL, ZEROED,
    )  # fmt: skip
    if CONSISTENT:
        excess += tl.sum(grads, 1)
        total += tl.sum(weights, 1)
    if const.SOFTCAP:
        grads *= 1.0 - cap_tanh * cap_tanh
    return tl.dot(grads.to(k.dtype), k, dq, input_precision=const.PRECISION), excess, total


@triton.jit
def grad_scores(
    q, do, statistics, i, j_begin, keys, sequence, key, value, draws, mask, settings, stats,
    const: tl.constexpr, PARTIAL: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    """Return dS and P, both (queries, keys), the tanh of softcap, and the keys of a KV block.

    dS does not include the derivative of softcap. If ZEROED, keys masked for all queries are 0.
    """
    lse, lse_factor, delta, grad_lse = statistics
    j = j_begin + tl.arange(0, const.BLOCK_N)
    k, v = load_key_value(keys, key, value, j_begin, j, const, PARTIAL)
    loaded = load_mask(i, j, j_begin, sequence, mask, const, PARTIAL, False)
    products = tl.dot(q, tl.trans(k), input_precision=const.PRECISION)
    scores, visible, cap_tanh = finish_scores(
        products, i, j, loaded, sequence, mask, settings, const, PARTIAL, False
    )
    if ZEROED:  # NaN in v only affects masked columns, which are zeroed below
        k = zero_fully_masked(k, visible)
    weights = power(scores - lse[:, None], const)
    if stats.lse_factor is not None:
        weights *= lse_factor[:, None]
    grads = tl.dot(do, tl.trans(v), input_precision=const.PRECISION)
    if draws is not None:
        keep = dropout_keep(draws, i, j_begin, sequence, settings, const, False)
        grads = tl.where(keep, grads * settings.dropout_scale, 0.0)
    grads -= delta[:, None]
    if stats.grad_lse is not None:
        grads += grad_lse[:, None]
    grads *= weights
    if PARTIAL:
        grads = tl.where(visible, grads, 0.0)
    return grads, weights, cap_tanh, k


@triton.jit(do_not_specialize=SIZES)
def attention_bwd_dkdv_kernel(
    query, key, value, grad_out, grad_key, grad_value, seed, cu_seqlens_q, cu_seqlens_k,
    mask, lists,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    settings, stats, const: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV for BLOCK_N keys of a KV head, summed over the GROUP heads sharing it."""
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m, num_n = tl.cdiv(seqlen_q, const.BLOCK_M), tl.cdiv(seqlen_k, const.BLOCK_N)
    pid = tl.program_id(0)
    n, bh = pid % num_n, pid // num_n
    b, h_kv = bh // sizes.num_heads_kv, bh % sizes.num_heads_kv
    query_batch, query_first, seqlen_q = sequence_rows(cu_seqlens_q, b, sizes.seqlen_q)
    key_batch, key_first, seqlen_k = sequence_rows(cu_seqlens_k, b, sizes.seqlen_k)
    j_begin = n * const.BLOCK_N
    if j_begin >= seqlen_k:
        return
    bounds = sequence_bounds(mask, sizes, b)
    ranges = query_tiles(
        bounds, j_begin, j_begin + const.BLOCK_N, sizes.seqlen_q, sizes.seqlen_k, const.BLOCK_M
    )
    j = j_begin + tl.arange(0, const.BLOCK_N)
    k = load_tile(
        head_rows(key, key_batch, h_kv, key_first), key.stride_row, j_begin, j < seqlen_k,
        const.HEAD_DIM, const.BLOCK_N, const.BLOCK_D,
    )  # fmt: skip
    v = load_tile(
        head_rows(value, key_batch, h_kv, key_first), value.stride_row, j_begin, j < seqlen_k,
        const.HEAD_DIM_V, const.BLOCK_N, const.BLOCK_DV,
    )  # fmt: skip
    draws = None
    if seed is not None:
        draws = dropout_counters(tl.load(seed), settings, sizes, b)
    dk = tl.zeros((const.BLOCK_N, const.BLOCK_D), tl.float32)
    dv = tl.zeros((const.BLOCK_N, const.BLOCK_DV), tl.float32)
    for g in range(GROUP):
        h = h_kv * GROUP + g
        tiles = visible_tiles(ranges, lists, b, h, n, num_n, num_m)
        sequence = Sequence(b, h, seqlen_q, seqlen_k, bounds)
        query_at = head_rows(query, query_batch, h, query_first)
        grad_out_at = head_rows(grad_out, query_batch, h, query_first)
        at = statistics_at(sizes, query_batch, h, query_first)
        m = full_tile(0, tiles, lists)
        for t in tl.range(0, tiles[0]):
            following = full_tile(t + 1, tiles, lists)
            dk, dv = _dkdv_tile(
                dk, dv, k, v, m * const.BLOCK_M, j_begin, j, query_at, grad_out_at, at, sequence,
                query, grad_out, draws, mask, settings, stats, const, False,
            )  # fmt: skip
            m = following
        m = partial_tile(0, tiles, lists)
        for t in tl.range(0, tiles[1]):
            following = partial_tile(t + 1, tiles, lists)
            dk, dv = _dkdv_tile(
                dk, dv, k, v, m * const.BLOCK_M, j_begin, j, query_at, grad_out_at, at, sequence,
                query, grad_out, draws, mask, settings, stats, const, True,
            )  # fmt: skip
            m = following
    store_tile(
        head_rows(grad_key, key_batch, h_kv, key_first), grad_key.stride_row, j_begin, seqlen_k,
        dk * settings.softmax_scale, const.HEAD_DIM, const.BLOCK_N, const.BLOCK_D,
    )  # fmt: skip
    store_tile(
        head_rows(grad_value, key_batch, h_kv, key_first), grad_value.stride_row, j_begin, seqlen_k,
        dv * settings.dropout_scale, const.HEAD_DIM_V, const.BLOCK_N, const.BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, i_begin, j_begin, j, query_at, grad_out_at, at, sequence, query, grad_out, draws,
    mask, settings, stats, const: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Accumulate one query tile into dK and dV.

    Scores are (keys, queries) here, so that P and dS are left operands without a transpose.
    """
    seqlen_q = sequence.seqlen_q
    i = i_begin + tl.arange(0, const.BLOCK_M)
    lse, lse_factor, delta, grad_lse = load_statistics(stats, at, i, seqlen_q)
    # Do not load fully masked rows. They may contain NaN, and 0 * NaN is NaN.
    valid = lse != float("inf") if PARTIAL else i < seqlen_q
    q = load_tile(
        query_at, query.stride_row, i_begin, valid, const.HEAD_DIM, const.BLOCK_M, const.BLOCK_D
    )
    do = load_tile(
        grad_out_at, grad_out.stride_row, i_begin, valid,
        const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
    )  # fmt: skip
    loaded = load_mask(i, j, j_begin, sequence, mask, const, PARTIAL, True)
    products = tl.dot(k, tl.trans(q), input_precision=const.PRECISION)
    scores, visible, cap_tanh = finish_scores(
        products, i, j, loaded, sequence, mask, settings, const, PARTIAL, True
    )
    weights = power(scores - lse[None, :], const)
    if stats.lse_factor is not None:
        weights *= lse_factor[None, :]
    grads = tl.dot(v, tl.trans(do), input_precision=const.PRECISION)
    used = weights
    if draws is not None:
        keep = dropout_keep(draws, i, j_begin, sequence, settings, const, True)
        used = tl.where(keep, weights, 0.0)
        grads = tl.where(keep, grads * settings.dropout_scale, 0.0)
    dv = tl.dot(used.to(do.dtype), do, dv, input_precision=const.PRECISION)
    grads -= delta[None, :]
    if stats.grad_lse is not None:
        grads += grad_lse[None, :]
    grads *= weights
    if PARTIAL:
        grads = tl.where(visible, grads, 0.0)
    if const.SOFTCAP:
        grads *= 1.0 - cap_tanh * cap_tanh
    return tl.dot(grads.to(q.dtype), q, dk, input_precision=const.PRECISION), dv


@triton.jit
def statistics_at(sizes, query_batch, h, query_first):
    """Return the index into RowStatistics of the first query of a sequence and head."""
    return (query_batch.to(tl.int64) * sizes.num_heads + h) * sizes.total_q + query_first


@triton.jit
def load_statistics(stats, at, i, seqlen_q):
    """Load lse, lse_factor, delta and grad_lse of the queries i.

    From seqlen_q on, lse is inf, which makes P 0. If lse_factor or grad_lse is None, a placeholder
    is returned.
    """
    inside = i < seqlen_q
    lse = tl.load(stats.lse + at + i, inside, float("inf"))
    delta = tl.load(stats.delta + at + i, inside, 0.0)
    lse_factor, grad_lse = delta, delta
    if stats.lse_factor is not None:
        lse_factor = tl.load(stats.lse_factor + at + i, inside, 0.0)
    if stats.grad_lse is not None:
        grad_lse = tl.load(stats.grad_lse + at + i, inside, 0.0)
    return lse, lse_factor, delta, grad_lse


@triton.jit
def load_queries(
    query, grad_out, stats, at, batch, h, first, i_begin, i, seqlen_q, const: tl.constexpr
):
    """Load a query tile, the corresponding tile of grad_out, and the row statistics."""
    inside = i < seqlen_q
    q = load_tile(
        head_rows(query, batch, h, first), query.stride_row, i_begin, inside,
        const.HEAD_DIM, const.BLOCK_M, const.BLOCK_D,
    )  # fmt: skip
    do = load_tile(
        head_rows(grad_out, batch, h, first), grad_out.stride_row, i_begin, inside,
        const.HEAD_DIM_V, const.BLOCK_M, const.BLOCK_DV,
    )  # fmt: skip
    return q, do, load_statistics(stats, at, i, seqlen_q)
