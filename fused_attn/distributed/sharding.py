"""Distribution of the positions of a sequence over ranks, and the global offsets of a shard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MAX_RUNS = 256  # per rank; attention computes each pair of runs separately

Runs = tuple[range, ...]


class Sharding:
    """The positions of a sequence that each rank holds.

    The rows of a rank are runs of consecutive positions, in any order. Every position belongs to
    exactly one rank; ranks may have different numbers of rows, or none.

    Attributes:
        runs: for each rank, its runs of positions, in the order of its rows.
        length: number of positions.

    Args:
        runs: for each rank, its runs of positions: ranges with a step of 1.

    Raises:
        ValueError: the runs are not a partition of range(length), or a rank has more than MAX_RUNS.

    Example:
        >>> sharding = fused_attn.distributed.Sharding.zigzag(8, 2)
        >>> [sharding.positions(rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    def __init__(self, runs: Sequence[Iterable[range]]) -> None:
        for run in itertools.chain(*(runs := [list(own) for own in runs])):
            if run.step != 1:
                raise ValueError(f"runs must be ranges with a step of 1, got {run}")
        self.runs: tuple[Runs, ...] = tuple(
            _joined(run for run in own if len(run) > 0) for own in runs
        )
        ordered = sorted((run.start, run.stop) for own in self.runs for run in own)
        stops = [0, *(stop for _, stop in ordered)]
        for (start, _), stop in zip(ordered, stops, strict=False):
            if start != stop:
                problem = f"{stop} is missing" if start > stop else f"{start} is repeated"
                raise ValueError(
                    f"the positions of all ranks must together be range(length), but {problem}"
                )
        self.length = stops[-1]
        # Equal in all processes, unlike hashes of strings. An empty run separates the ranks.
        table = [(run.start, run.stop) for own in self.runs for run in (*own, range(0))]
        self._hash = hash(tuple(table))
        most = max(map(len, self.runs), default=0)
        if most > MAX_RUNS:
            raise ValueError(
                f"positions of a rank must form at most {MAX_RUNS} runs of consecutive positions, "
                f"got {most}"
            )

    @staticmethod
    def contiguous(length: int, ranks: int) -> Sharding:
        """Assign one run to each rank; lengths differ by at most 1."""
        ends = [length * rank // ranks for rank in range(ranks + 1)]
        return Sharding([[range(a, b)] for a, b in itertools.pairwise(ends)])

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> Sharding:
        """Assign the next lengths[r] positions to rank r."""
        ends = list(itertools.accumulate(lengths, initial=0))
        return Sharding([[range(a, b)] for a, b in itertools.pairwise(ends)])

    @staticmethod
    def zigzag(length: int, ranks: int) -> Sharding:
        """Assign chunks r and 2 * ranks - 1 - r of 2 * ranks chunks to rank r.

        This balances causal masks without documents. Source: Zhu 2024, ring-flash-attention.
        """
        ends = [length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
        chunks = [range(a, b) for a, b in itertools.pairwise(ends)]
        return Sharding([[chunks[rank], chunks[-1 - rank]] for rank in range(ranks)])

    @staticmethod
    def of_positions(positions: Sequence[Tensor | Sequence[int]]) -> Sharding:
        """Assign positions[r], integers of shape (rows of the rank,), to rank r."""
        return Sharding([runs_of(torch.as_tensor(own)) for own in positions])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.runs)

    def rows(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return sum(map(len, self.runs[rank]))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a rank, int64 (rows,), in the order of its rows."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.runs[rank]]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)

    def merged(self, size: int) -> Sharding:
        """Return the sharding of groups of `size` consecutive ranks, with ascending positions."""
        groups = [self.runs[first : first + size] for first in range(0, self.ranks, size)]
        return Sharding(
            [sorted(itertools.chain(*group), key=lambda run: run.start) for group in groups]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and self.runs == other.runs

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        rows = ", ".join(str(self.rows(rank)) for rank in range(self.ranks))
        return f"Sharding({self.length} positions, rows of each rank: {rows})"


def runs_of(positions: Tensor) -> Runs:
    """Return the maximal runs of consecutive positions, in the order of the positions."""
    positions = positions.to("cpu", torch.int64)
    ends = (positions.diff() != 1).nonzero()[:, 0] + 1
    runs = positions.tensor_split(ends) if len(positions) else ()
    return tuple(range(int(run[0]), int(run[-1]) + 1) for run in runs)


def _joined(runs: Iterable[range]) -> Runs:
    """Join each run that continues the previous one with it."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)


def attention_offsets(
    batch: int,
    *,
    row0: int = 0,
    key0: int = 0,
    head0: int,
    num_heads_global: int,
    batch0: int = 0,
    device: torch.device | str,
) -> Tensor:
    """Return the `dropout_offsets` of a shard of an attention call.

    A shard is a call on some of the queries, keys, heads or sequences of a global call. The offsets
    are added to its positions (base/philox.py), so it drops the same elements as the global call.

    Args:
        batch: number of sequences in the shard, padded or packed.
        row0: global position of the first query.
        key0: global position of the first key. Must be a multiple of 8, because 8 adjacent keys
            share a Philox counter.
        head0: global index of the first head.
        num_heads_global: number of heads of the global call.
        batch0: global index of the first sequence.
        device: device of the shard's query.

    Returns:
        int64 (batch, 3): row0, key0, and the head word of the Philox counter for the first head,
        which is the sequence's global index * num_heads_global + head0. Counters use the lower 32
        bits of these values.

    Example:
        >>> attention_offsets(2, row0=64, head0=4, num_heads_global=8, device="cpu").tolist()
        [[64, 0, 4], [64, 0, 12]]
    """
    # Fill on the device: a copy from the host would synchronize and fail in a CUDA graph.
    heads = torch.arange(batch0, batch0 + batch, device=device) * num_heads_global + head0
    return torch.stack([torch.full_like(heads, row0), torch.full_like(heads, key0), heads], dim=1)
