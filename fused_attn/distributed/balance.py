"""Distribution of positions by the number of keys that they attend to.

A sharding is balanced if no rank has much more work than the mean, as all wait for the slowest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_attn.base.philox import DECISIONS
from fused_attn.distributed.sharding import MAX_RUNS, Sharding
from fused_attn.masks import Mask, as_mask
from fused_attn.masks.spec import MaskSpec, normalize
from fused_attn.masks.visible_keys import VisibleKeys
from fused_attn.varlen import packed_spec

# Ratio of the largest work of a rank to the mean: exchanges stop at GOOD, and smaller chunks are
# tried above FAIR.
GOOD, FAIR = 1.02, 1.05
# Chunks per rank, tried in this order. Computed for 2^20 positions on 512 ranks: causal documents,
# log-normal lengths of median 1000, sigma 1.5. 8 chunks: ratio 1.11, 5.6 % of all keys received;
# 16: 1.02, 6.8 %, 9 runs; 32: 1.02, 10 %, 12 runs.
CHUNKS_PER_RANK = (16, 32, 64)
# A chunk may go to a rank whose work exceeds the least by this part of the mean. In the
# same case, with 0.05, 10.0 % of all keys are received; with 0.2, 8.6 %; with 0.5, 6.8 %; with 1.0,
# the ratio is 1.16.
SLACK = 0.5
LOCALITY = 3.0  # cost of a chunk of keys to receive, in the mean work of a chunk of queries
RECEIVING = 0.1  # the same cost during exchanges, where balance matters more
COLDEST = 8  # number of ranks that are considered for an exchange
EXCHANGES = 8  # limit, per rank; about 4 are needed


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

    The result is the first of these that is balanced: consecutive positions, zigzag, and chunks
    that are dealt. Chunks are dealt in descending order of their work, each to one of the ranks
    with the least work, preferably one that already has the keys. Then ranks with much work
    exchange chunks with ranks with little. If the largest work exceeds the mean by more than 5 % in
    all shardings, the most balanced one is returned.

    Ranks have equal numbers of rows up to one chunk, as runs in ascending order. Runs begin at
    multiples of 8 if the length permits it, as dropout prefers. The result depends only on the
    arguments, so all ranks can compute it without communication. It takes O(length) operations, and
    0.5 s for 2^20 positions and 512 ranks (one core of a Zen 5 CPU).

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
        chunk_size: number of positions per chunk; if given, chunks are always dealt. None selects
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
        return normalize(mask, batch, num_heads, length, length, row)
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    rows = row.expand(length, -1, -1)
    return packed_spec(rows, rows, cu_seqlens, cu_seqlens, longest, longest, mask, is_causal)


def _candidates(visible: VisibleKeys, work: Tensor, ranks: int) -> Iterator[tuple[Sharding, bool]]:
    """Yield shardings, and False for dealt ones; earlier ones usually send fewer keys."""
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
    """Return a number of positions per chunk: a multiple of DECISIONS if possible."""
    size = max(length // (ranks * chunks), 1)
    return size // DECISIONS * DECISIONS if size >= DECISIONS else size


# ---- dealing ------------------------------------------------------------------------------------


@dataclass
class _Deal:
    """Chunks that are assigned to ranks.

    Invariant: a rank has at most `room` chunks, in the first columns of its row of `held`.

    Attributes:
        work: visible keys of each chunk, int64 (chunks,).
        begin, end: chunks of keys that each chunk attends to, [begin, end).
        room: number of chunks that each rank gets, int64 (ranks,).
        held: chunks of each rank, int64 (ranks, largest room); -1 for none.
        load: work of each rank, int64 (ranks,).
    """

    work: Any
    begin: Any
    end: Any
    room: Any
    held: Any
    load: Any


def _dealt(visible: VisibleKeys, work: Tensor, ranks: int, size: int) -> Sharding:
    """Return the Sharding of chunks of a size, dealt by their work."""
    length = len(work)
    firsts = np.arange(0, length, size)
    begin, end = visible.ranges(firsts)
    count = len(firsts)
    room = count // ranks + (np.arange(ranks) >= ranks - count % ranks).astype(np.int64)
    deal = _Deal(
        work=np.add.reduceat(work.numpy(), firsts),
        begin=begin // size,
        end=-(-end // size),
        room=room,
        held=np.full((ranks, int(room.max())), -1),
        load=np.zeros(ranks, np.int64),
    )
    fixed = count - 1 if length % size else None
    _assign(deal, fixed)
    _exchange(deal, fixed)
    chunks = [np.sort(own[own >= 0]).tolist() for own in deal.held]
    return Sharding([[range(c * size, min((c + 1) * size, length)) for c in own] for own in chunks])


def _assign(deal: _Deal, fixed: int | None) -> None:
    """Deal all chunks in descending order of work.

    Args:
        fixed: the chunk that is shorter than the others; the last rank, which has most
            room, gets it.
    """
    count, ranks = len(deal.work), len(deal.load)
    available = np.zeros((count, ranks), bool)  # keys that a rank holds or receives
    filled = np.zeros(ranks, np.int64)
    mean_chunk, mean_rank = deal.work.sum() / count, deal.work.sum() / ranks
    order = np.argsort(-deal.work, kind="stable").tolist()
    if fixed is not None:
        order.remove(fixed)
        order.insert(0, fixed)
    for chunk in order:
        begin, end = int(deal.begin[chunk]), int(deal.end[chunk])
        wanted = end - begin
        # Sample about 8 chunks of keys.
        sample = available[begin : end : max(wanted // 8, 1)]
        missing = wanted * (1.0 - sample.sum(0) / max(len(sample), 1))
        load = np.where(filled < deal.room, deal.load, np.inf)
        cost = deal.load + LOCALITY * mean_chunk * missing
        cost[load > load.min() + SLACK * mean_rank] = np.inf
        rank = ranks - 1 if chunk == fixed else int(cost.argmin())
        deal.held[rank, filled[rank]] = chunk
        filled[rank] += 1
        deal.load[rank] += deal.work[chunk]
        available[begin:end, rank] = True
        available[chunk, rank] = True


def _exchange(deal: _Deal, fixed: int | None) -> None:
    """Exchange chunks of ranks with much work for chunks of ranks with little.

    Dealing alone leaves a largest work of 1.19 to 1.25 times the mean (packed documents, 64 and
    512 ranks) and takes twice the time, as more chunk sizes are tried. With exchanges it is 1.02.

    Args:
        fixed: a chunk that must not move.
    """
    ranks = len(deal.load)
    limit = GOOD * deal.load.sum() / ranks
    before = np.stack([_keys_before(deal, rank) for rank in range(ranks)])
    final = np.zeros(ranks, bool)  # no exchange improves these
    for _ in range(EXCHANGES * ranks):
        most = int(np.where(final, -1, deal.load).argmax())
        if final[most] or deal.load[most] <= limit:
            break
        found = _best_exchange(deal, most, before, fixed)
        if found is None:
            final[most] = True
            continue
        rank, i, j = found
        a, b = deal.held[most, i], deal.held[rank, j]
        deal.held[most, i], deal.held[rank, j] = b, a
        difference = deal.work[a] - deal.work[b]
        deal.load[most] -= difference
        deal.load[rank] += difference
        for changed in (most, rank):
            before[changed] = _keys_before(deal, changed)
            final[changed] = False


def _best_exchange(
    deal: _Deal, most: int, before: Any, fixed: int | None
) -> tuple[int, int, int] | None:
    """Return the exchange of a chunk of rank `most` with the least cost.

    Returns:
        The other rank, and the columns of `_Deal.held` of both chunks; None if no exchange helps.
    """
    others = np.argsort(deal.load, kind="stable")[:COLDEST]
    mine, theirs = deal.held[most], deal.held[others]  # (m,), (others, m)
    mean = deal.load.sum() / len(deal.load)
    moved = deal.work[mine][None, :, None] - deal.work[theirs][:, None, :]
    wanted = np.minimum(deal.load[most] - mean, mean - deal.load[others])[:, None, None]
    cost = np.abs(wanted - moved) * (len(deal.work) / deal.work.sum())
    begin, end = deal.begin[mine], deal.end[mine]
    to_others = end - begin - (before[others][:, end] - before[others][:, begin])
    begin, end = deal.begin[theirs], deal.end[theirs]
    to_most = end - begin - (before[most][end] - before[most][begin])
    cost = cost + RECEIVING * (to_others[:, :, None] + to_most[:, None, :])
    largest = np.maximum(deal.load[most] - moved, deal.load[others][:, None, None] + moved)
    fits = (moved > 0) & (largest < deal.load[most])
    fits &= ((mine >= 0) & (mine != fixed))[None, :, None]
    fits &= ((theirs >= 0) & (theirs != fixed))[:, None, :]
    cost[~fits] = np.inf
    at = int(cost.argmin())
    if not fits.flat[at]:
        return None
    other, i, j = np.unravel_index(at, cost.shape)
    return int(others[other]), int(i), int(j)


def _keys_before(deal: _Deal, rank: int) -> Any:
    """Return, for each chunk, how many earlier key chunks a rank has, (chunks + 1,)."""
    own = deal.held[rank][deal.held[rank] >= 0]
    changes = np.zeros(len(deal.work) + 1, np.int32)
    np.add.at(changes, np.concatenate([deal.begin[own], own]), 1)
    np.add.at(changes, np.concatenate([deal.end[own], own + 1]), -1)
    available = changes.cumsum()[:-1] > 0
    return np.concatenate([[0], available.cumsum()]).astype(np.int32)
