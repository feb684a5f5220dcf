"""Distribution of positions by the number of keys that they attend to.

A sharding is balanced if no rank has much more work than the mean: all ranks wait for the slowest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_attn.base.philox import DECISIONS
from fused_attn.call.packed import packed_spec
from fused_attn.distributed.sharding import MAX_RUNS, Sharding
from fused_attn.distributed.visible_keys import VisibleKeys
from fused_attn.masks import Mask, as_mask
from fused_attn.masks.spec import MaskSpec, spec_of_mask

# Limits on the ratio of the largest work of a rank to the mean. Consecutive or zigzag positions are
# accepted up to GOOD. Above FAIR, smaller chunks are tried.
GOOD, FAIR = 1.02, 1.05
# Chunks per rank, tried in this order. With the documents below, 16 chunks lead to at most 14 runs.
CHUNKS_PER_RANK = (16, 32, 64)
# A chunk may be assigned to a rank whose work exceeds the minimum by SLACK * (1 - f^2) times the
# mean, where f is the fraction of all work assigned so far: early chunks follow their keys, late
# chunks even out the work. For 2^20 positions on 512 ranks, documents with log-normal lengths of
# median 1000, sigma 1.5: ratio 1.01, 6.6 % of all keys received. SLACK 0.25: 1.00, 10 %.
SLACK = 0.5
LOCALITY = 3.0  # cost of receiving a chunk of keys, as a multiple of the mean work of a chunk


def balanced(
    attn_mask: Tensor | Mask | None,
    length: int,
    ranks: int,
    *,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    batch: int = 1,
    num_heads: int = 1,
    chunk_size: int | None = None,
) -> Sharding:
    """Return a Sharding in which each rank has about the same number of visible keys to compute.

    The result is the first of these that is balanced: consecutive positions, zigzag, and chunks of
    positions. Chunks are assigned in descending order of their work, each to one of the ranks with
    the least work, preferably one that already has the keys. If the largest work exceeds the mean
    by more than 5 % in all shardings, the most balanced one is returned.

    Numbers of rows per rank differ by at most one chunk. Runs are in ascending order, and begin at
    multiples of 8 if the length permits it, so that dropout needs no padding. The result depends
    only on the arguments, so all ranks can compute it without communication. This takes O(length)
    operations, and 0.5 s for 2^20 positions and 512 ranks (one core of a Zen 5 CPU).

    Args:
        attn_mask: mask of the complete sequence, as in ring_attention; queries and keys have the
            same positions.
        length: number of positions; with cu_seqlens, number of packed rows.
        ranks: number of ranks.
        is_causal: apply a causal mask.
        cu_seqlens: (sequences + 1,), cumulative lengths of packed sequences.
        batch: number of sequences that the mask describes; their work is added up. Ignored with
            cu_seqlens.
        num_heads: number of heads that the mask describes.
        chunk_size: number of positions per chunk; if given, chunks are always used. None selects
            it automatically.

    Raises:
        ValueError: a number is too small, the mask does not fit the length, or chunk_size leads
            to more than MAX_RUNS chunks per rank.

    Example:
        >>> ids = torch.arange(4096)[None] // 700
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.documents(ids)
        >>> fused_attn.distributed.balanced_sharding(mask, 4096, 4)
        Sharding(4096 positions, rows of each rank: 1024, 1024, 1024, 1024)
    """
    for name, value, least in (("length", length, 0), ("ranks", ranks, 1), ("batch", batch, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    least = max(-(-length // (MAX_RUNS * ranks)), 1)
    if chunk_size is not None and chunk_size < least:
        raise ValueError(
            f"chunk_size must be at least {least} (at most {MAX_RUNS} chunks per rank), got "
            f"{chunk_size}"
        )
    if length == 0:
        return Sharding.contiguous(0, ranks)
    spec = _spec(attn_mask, length, is_causal, cu_seqlens, batch, num_heads)
    packed = cu_seqlens is not None
    visible = VisibleKeys(spec, (1 if packed else batch, num_heads, length, length))
    work = visible.work
    if chunk_size is not None:
        return _dealt(visible, work, ranks, chunk_size)
    best, least_ratio = Sharding.contiguous(length, ranks), float("inf")
    for sharding, undealt in _candidates(visible, work, ranks):
        ratio = imbalance(work, sharding)
        if ratio < least_ratio:
            best, least_ratio = sharding, ratio
        if ratio <= (GOOD if undealt else FAIR):
            break
    return best


def work_of_ranks(work: Tensor, sharding: Sharding) -> Tensor:
    """Return the work of each rank, int64 (ranks,), from the work of each position (length,)."""
    before = np.concatenate([[0], work.numpy().cumsum()])
    runs = [(rank, run.start, run.stop) for rank, own in enumerate(sharding.runs) for run in own]
    rank, start, stop = np.array(runs, np.int64).reshape(-1, 3).T
    of_ranks = np.zeros(sharding.ranks, np.int64)
    np.add.at(of_ranks, rank, before[stop] - before[start])
    return torch.from_numpy(of_ranks)


def imbalance(work: Tensor, sharding: Sharding) -> float:
    """Return the ratio of the largest work of a rank to the mean; 1 without work."""
    of_ranks = work_of_ranks(work, sharding)
    total = int(of_ranks.sum())
    return int(of_ranks.max()) * sharding.ranks / total if total else 1.0


def _spec(
    attn_mask: Tensor | Mask | None,
    length: int,
    is_causal: bool,
    cu_seqlens: Tensor | None,
    batch: int,
    num_heads: int,
) -> MaskSpec:
    """Return the MaskSpec of the complete sequence, or of the packed sequences."""
    packed = cu_seqlens is not None
    mask = as_mask(attn_mask, is_causal and not packed)
    tensors = () if mask is None else [t for t in mask.tensors() if t is not None]
    device = next((t.device for t in (*tensors, cu_seqlens) if t is not None), None)
    row = torch.empty(1, num_heads, 1, device=device)
    if cu_seqlens is None:
        return spec_of_mask(mask, batch, num_heads, length, length, row.device)
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    rows = row.expand(length, -1, -1)
    return packed_spec(rows, rows, cu_seqlens, cu_seqlens, longest, longest, mask, is_causal)


def _candidates(visible: VisibleKeys, work: Tensor, ranks: int) -> Iterator[tuple[Sharding, bool]]:
    """Yield shardings, with False if chunks are dealt; earlier ones usually send fewer keys."""
    length = len(work)
    yield Sharding([[run] for run in _parts(length, ranks)]), True
    chunks = _parts(length, 2 * ranks)
    yield Sharding([[chunks[rank], chunks[-1 - rank]] for rank in range(ranks)]), True
    sizes = [_chunk_size(length, ranks, number) for number in CHUNKS_PER_RANK]
    for size in dict.fromkeys(sizes):
        yield _dealt(visible, work, ranks, size), False


def _parts(length: int, parts: int) -> list[range]:
    """Divide range(length) into equal parts that begin at multiples of DECISIONS if possible."""
    unit = DECISIONS if length >= DECISIONS * parts else 1
    ends = [length // unit * i // parts * unit for i in range(parts)] + [length]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _chunk_size(length: int, ranks: int, chunks: int) -> int:
    """Return the number of positions per chunk, a multiple of DECISIONS if possible."""
    size = max(length // (ranks * chunks), 1)
    return size // DECISIONS * DECISIONS if size >= DECISIONS else size


def _dealt(visible: VisibleKeys, work: Tensor, ranks: int, size: int) -> Sharding:
    """Return the Sharding with chunks of `size` positions, assigned by their work."""
    length = len(work)
    firsts = np.arange(0, length, size)
    begin, end = visible.ranges(firsts)
    of_chunks = np.add.reduceat(work.numpy(), firsts)
    dealt = _deal(of_chunks, begin // size, -(-end // size), ranks, last_is_short=length % size > 0)
    return Sharding(
        [[range(c * size, min((c + 1) * size, length)) for c in sorted(own)] for own in dealt]
    )


def _deal(work: Any, begin: Any, end: Any, ranks: int, last_is_short: bool) -> list[list[int]]:
    """Return the chunks of each rank, assigned in descending order of work.

    Args:
        work: visible keys of each chunk, int64 (chunks,).
        begin, end: chunks of keys that each chunk attends to, [begin, end).
        ranks: number of ranks.
        last_is_short: the last chunk has fewer positions than the others. It is assigned to the
            last rank, which has as many chunks as any other rank.
    """
    count, total = len(work), max(int(work.sum()), 1)
    mean_chunk, mean_rank = total / count, total / ranks
    room = count // ranks + (np.arange(ranks) >= ranks - count % ranks)  # chunks left to assign
    load = np.zeros(ranks)  # work of each rank
    available = np.zeros((count, ranks), bool)  # keys that a rank holds or receives
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    order = np.argsort(-work, kind="stable").tolist()
    if last_is_short:
        order.remove(count - 1)
        order.insert(0, count - 1)
    for chunk in order:
        keys = slice(int(begin[chunk]), int(end[chunk]))
        wanted = keys.stop - keys.start
        sample = available[keys][:: max(wanted // 8, 1)]  # about 8 chunks
        missing = wanted * (1.0 - sample.sum(0) / max(len(sample), 1))
        cost = load + LOCALITY * mean_chunk * missing
        slack = SLACK * mean_rank * (1.0 - (load.sum() / total) ** 2)
        cost[load > load[room > 0].min() + slack] = np.inf
        cost[room == 0] = np.inf
        rank = ranks - 1 if last_is_short and chunk == count - 1 else int(cost.argmin())
        dealt[rank].append(chunk)
        room[rank] -= 1
        load[rank] += work[chunk]
        available[keys, rank] = available[chunk, rank] = True
    return dealt
