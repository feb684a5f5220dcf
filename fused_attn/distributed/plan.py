"""Plan of ring attention: the keys that each rank needs from each other rank, and their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fused_attn.base.philox import DECISIONS
from fused_attn.distributed.sharding import Sharding
from fused_attn.distributed.visible_keys import VisibleKeys


class Piece(NamedTuple):
    """Consecutive positions of one sequence that a rank holds.

    Attributes:
        rows: the rows of the rank.
        positions: the positions of these rows in their sequence.
        sequence: index of the sequence if sequences are packed, else None.
    """

    rows: range
    positions: range
    sequence: int | None

    @property
    def offset(self) -> int:
        """Difference of a position and its row."""
        return self.positions.start - self.rows.start

    def part(self, positions: range) -> Piece:
        """Return the part of this piece that holds the given positions."""
        rows = range(positions.start - self.offset, positions.stop - self.offset)
        return Piece(rows, positions, self.sequence)


class Block(NamedTuple):
    """A range of queries and a range of keys of one sequence, computed by one kernel call.

    Attributes:
        queries: rows of the rank that computes the block.
        keys: rows of the rank that owns the keys.
        received: the same keys, as rows of the message that the rank receives (see Step).
    """

    queries: Piece
    keys: Piece
    received: range


@dataclass(frozen=True)
class Step:
    """One step of a rank, in which it attends to keys of one other rank.

    Attributes:
        blocks: the blocks to compute.
        wanted: rows to receive, as rows of the rank that owns the keys, in ascending order.
        sent: rows of this rank, in ascending order, that are sent to the rank that needs them.
    """

    blocks: tuple[Block, ...]
    wanted: tuple[range, ...]
    sent: tuple[range, ...]


class Plan(NamedTuple):
    """Work of a rank in ring attention.

    Attributes:
        queries: the pieces of its queries.
        steps: in step s, the rank attends to keys of rank (rank - s) % ranks.
    """

    queries: tuple[Piece, ...]
    steps: tuple[Step, ...]


def plan_of(
    queries: Sharding,
    keys: Sharding,
    rank: int,
    visible: VisibleKeys,
    *,
    starts: tuple[Sequence[int], Sequence[int]] | None = None,
    prefix: bool = False,
    dropout: bool = False,
) -> Plan:
    """Return the plan of a rank.

    Args:
        queries, keys: the positions of each rank; packed rows for packed sequences.
        rank: the rank.
        visible: lookup of visible keys.
        starts: cumulative lengths of the packed queries and keys, or None.
        prefix: True for a prefix mask; queries and keys of a block are then equal or disjoint.
        dropout: True if there is dropout; blocks then begin at multiples of DECISIONS if possible.

    Raises:
        ValueError: there are prefixes and dropout, and a run does not begin at such a multiple.
    """
    ranks = keys.ranks
    starts_q, starts_k = (None, None) if starts is None else starts
    pieces = [pieces_of(queries, r, starts_q) for r in range(ranks)]
    pieces_k = [pieces_of(keys, r, starts_k) for r in range(ranks)]
    alignment = DECISIONS if dropout else 1
    if prefix and dropout:
        starts_of = (p.positions.start for of_rank in (*pieces, *pieces_k) for p in of_rank)
        if any(start % DECISIONS for start in starts_of):  # raised on all ranks
            raise ValueError(
                "with a prefix mask and dropout, each run of consecutive positions must begin at a "
                f"multiple of {DECISIONS} in its sequence"
            )

    def blocks(of: int, by: int) -> list[tuple[Piece, Piece]]:
        return _blocks(pieces[by], pieces_k[of], visible, starts, prefix, alignment)

    steps = []
    for s in range(ranks):
        own = blocks((rank - s) % ranks, rank)
        wanted = union(key.rows for _, key in own)
        sent = union(key.rows for _, key in blocks(rank, (rank + s) % ranks))
        placed = tuple(Block(q, k, _within(wanted, k.rows)) for q, k in own)
        steps.append(Step(placed, wanted, sent))
    return Plan(tuple(pieces[rank]), tuple(steps))


def pieces_of(sharding: Sharding, rank: int, starts: Sequence[int] | None) -> list[Piece]:
    """Return the pieces of a rank, in the order of its rows.

    Args:
        starts: cumulative lengths of packed sequences, whose rows the sharding distributes, or
            None.
    """
    pieces, row = [], 0
    for run in sharding.runs[rank]:
        if starts is None:
            pieces.append(Piece(range(row, row + len(run)), run, None))
        for sequence, (first, last) in enumerate(itertools.pairwise(starts or ())):
            a, b = max(first, run.start), min(last, run.stop)
            if a < b:
                rows = range(row + a - run.start, row + b - run.start)
                pieces.append(Piece(rows, range(a - first, b - first), sequence))
        row += len(run)
    return pieces


def _blocks(
    queries: Sequence[Piece],
    keys: Sequence[Piece],
    visible: VisibleKeys,
    starts: tuple[Sequence[int], Sequence[int]] | None,
    prefix: bool,
    alignment: int,
) -> list[tuple[Piece, Piece]]:
    """Return the (queries, keys) blocks of all pairs of pieces that have visible keys."""
    blocks = []
    for query, key in itertools.product(queries, keys):
        if query.sequence != key.sequence:
            continue
        first_q = first_k = 0  # packed row of the first position of the sequence
        if starts is not None and query.sequence is not None:
            first_q, first_k = (s[query.sequence] for s in starts)
        found = visible.of(_moved(query.positions, first_q), _moved(key.positions, first_k))
        if found is None:
            continue
        found = _moved(found, -first_k)
        begin = max(found.start // alignment * alignment, key.positions.start)
        parts = [(query.positions, range(begin, found.stop))]
        if prefix:
            parts = split_at_overlap(*parts[0])
        blocks += [(query.part(q), key.part(k)) for q, k in parts]
    return blocks


def _moved(positions: range, offset: int) -> range:
    return range(positions.start + offset, positions.stop + offset)


def union(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return the union of ranges as disjoint ranges in ascending order."""
    union: list[range] = []
    for part in sorted(ranges, key=lambda r: (r.start, r.stop)):
        if union and part.start <= union[-1].stop:
            union[-1] = range(union[-1].start, max(part.stop, union[-1].stop))
        else:
            union.append(part)
    return tuple(union)


def _within(union: Sequence[range], rows: range) -> range:
    """Return the range of `rows` in the concatenation of disjoint ranges."""
    before = 0
    for part in union:
        if part.start <= rows.start and rows.stop <= part.stop:
            start = before + rows.start - part.start
            return range(start, start + len(rows))
        before += len(part)
    raise AssertionError("the rows are not in the union")


def split_at_overlap(queries: range, keys: range) -> list[tuple[range, range]]:
    """Split two ranges of positions so that each pair of parts is equal or disjoint."""
    cuts = sorted({queries.start, queries.stop, keys.start, keys.stop})
    parts = [range(a, b) for a, b in itertools.pairwise(cuts)]

    def within(whole: range) -> list[range]:
        return [p for p in parts if whole.start <= p.start and p.stop <= whole.stop]

    return [(q, k) for q in within(queries) for k in within(keys)]
