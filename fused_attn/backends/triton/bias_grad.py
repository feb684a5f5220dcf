"""Gradient of a float mask: dS summed over the dimensions in which the mask is broadcast.

Each program owns a tile of the mask and loops over the batch entries and heads that share it. If
there are too few tiles to occupy the GPU, several programs share a tile. Their partial sums are
added afterwards in a fixed order. Recomputing dS costs two more matmuls per tile, but avoids a
(batch, num_heads, seqlen_q, seqlen_k) tensor.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from fused_attn.backends.triton.attention_tile import dropout_counters, keys_of_tile, sequence_rows
from fused_attn.backends.triton.backward import grad_scores, load_queries, statistics_at
from fused_attn.backends.triton.masks import SIZES, Sizes
from fused_attn.backends.triton.tiles import SKIP


@triton.jit(do_not_specialize=[*SIZES, "bias_batch", "num_parts"])
def attention_bwd_bias_kernel(
    query, key, value, grad_out, seed, cu_seqlens_q, cu_seqlens_k, mask, kinds, kinds_heads,
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    settings, stats, parts, bias_batch, bias_heads, num_parts,
    const: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute one partial sum of one tile of the mask gradient.

    parts: float32 (num_parts, bias_batch, bias_heads, rows, columns), with a row per query if
    PER_ROW and a column per key if PER_COLUMN. If the mask is broadcast over queries or keys,
    parts has a row per query tile or a column per KV block instead.
    """
    sizes = Sizes(
        batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, total_q, band_lo, band_hi, alibi_offset,
    )  # fmt: skip
    num_m, num_n = tl.cdiv(seqlen_q, const.BLOCK_M), tl.cdiv(seqlen_k, const.BLOCK_N)
    pid = tl.program_id(0)
    n, rest = pid % num_n, pid // num_n
    m, rest = rest % num_m, rest // num_m
    bias_head, part = rest % (bias_batch * bias_heads), rest // (bias_batch * bias_heads)
    bias_b, bias_h = bias_head // bias_heads, bias_head % bias_heads
    shared_heads = sizes.num_heads // bias_heads
    shared = sizes.batch // bias_batch * shared_heads
    each = tl.cdiv(shared, num_parts)
    i_begin, j_begin = m * const.BLOCK_M, n * const.BLOCK_N
    if seed is not None:
        seed = tl.load(seed)
    total = tl.zeros((const.BLOCK_M, const.BLOCK_N), tl.float32)
    for s in range(part * each, tl.minimum(part * each + each, shared)):
        # The term with s is 0 in dimensions in which the mask is not broadcast.
        b, h = bias_b + s // shared_heads, bias_h + s % shared_heads
        at = ((b.to(tl.int64) * kinds_heads + h % kinds_heads) * num_m + m) * num_n + n
        if tl.load(kinds + at) != SKIP:
            total += _tile_of_head(
                query, key, value, grad_out, seed, cu_seqlens_q, cu_seqlens_k, mask, sizes,
                settings, stats, b, h, i_begin, j_begin, const,
            )  # fmt: skip
    i, j = i_begin + tl.arange(0, const.BLOCK_M), j_begin + tl.arange(0, const.BLOCK_N)
    rows = sizes.seqlen_q if PER_ROW else num_m
    columns = sizes.seqlen_k if PER_COLUMN else num_n
    head = parts + rest.to(tl.int64) * rows * columns
    if PER_ROW and PER_COLUMN:
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        tl.store(head + i.to(tl.int64)[:, None] * columns + j[None, :], total, inside)
    elif PER_ROW:
        tl.store(head + i.to(tl.int64) * columns + n, tl.sum(total, 1), i < rows)
    elif PER_COLUMN:
        tl.store(head + m.to(tl.int64) * columns + j, tl.sum(total, 0), j < columns)
    else:
        tl.store(head + m.to(tl.int64) * columns + n, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _tile_of_head(
    query, key, value, grad_out, seed, cu_seqlens_q, cu_seqlens_k, mask, sizes, settings, stats,
    b, h, i_begin, j_begin, const: tl.constexpr,
):  # fmt: skip
    """Return dS of one tile of a head, without the derivative of softcap."""
    draws = None
    if seed is not None:
        draws = dropout_counters(seed, settings, sizes, b)
    query_batch, query_first, seqlen_q = sequence_rows(cu_seqlens_q, b, sizes.seqlen_q)
    sequence, keys, _ = keys_of_tile(
        key, value, cu_seqlens_k, mask, sizes, b, h, i_begin, seqlen_q, const
    )
    i = i_begin + tl.arange(0, const.BLOCK_M)
    at = statistics_at(sizes, query_batch, h, query_first)
    q, do, statistics = load_queries(
        query, grad_out, stats, at, query_batch, h, query_first, i_begin, i, seqlen_q, const
    )
    grads, _, _, _ = grad_scores(
        q, do, statistics, i, j_begin, keys, sequence, key, value, draws, mask, settings,
        stats, const, True, False,
    )  # fmt: skip
    return grads
