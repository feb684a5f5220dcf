"""Positions of sequences in a packed, padded or gappy dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

Device = torch.device | str | None


@dataclass(eq=False)
class SeqLenInfo:
    """Start rows and lengths of sequences, as tensors and as lists of integers.

    Sequence b has seqlen[b] rows from row seqstart[b]; the last seqstart is the number of rows.
    With pages, seqstart[b] is relative to the first page of sequence b. `padding` is the distance
    between padded sequences, 0 for packed sequences without gaps, and None otherwise.
    """

    seqstart: Tensor
    seqstart_py: list[int]
    seqlen: Tensor
    seqlen_py: list[int]
    padding: int | None
    min_seqlen: int
    max_seqlen: int

    @classmethod
    def of(
        cls, lengths: Iterable[int], padding: int | None = 0, starts: Any = None, device: Any = None
    ) -> SeqLenInfo:
        """Return the positions of sequences with these lengths."""
        lengths = [int(n) for n in lengths]
        low, high = min(lengths, default=0), max(lengths, default=0)
        if padding and high > padding:
            raise ValueError(f"kv_seqlen must be at most kv_padding {padding}, got {lengths}")
        if starts is None:
            starts = accumulate([padding or n for n in lengths], initial=0)
        starts = [int(start) for start in starts]
        if len(starts) != len(lengths) + 1:
            raise ValueError(
                f"kv_seqstarts must have {len(lengths) + 1} values (a start for each sequence, and "
                f"the total number of rows), got {starts}"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        tensors = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths))
        return cls(next(tensors), starts, next(tensors), lengths, padding, low, high)

    def to(self, device: Device) -> SeqLenInfo:
        """Return the positions with their tensors on a device."""
        return replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None) -> list[Tensor]:
        """Split (1, total, ...) into sequences, or with batch_sizes into batches of sequences."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(
                f"tensor must have shape (1, {self.seqstart_py[-1]}, ...), got {tuple(x.shape)}"
            )
        sizes = [1] * len(self.seqlen_py) if batch_sizes is None else batch_sizes
        ends = pairwise(self.seqstart_py[n] for n in accumulate(sizes, initial=0))
        parts = x[0].split([stop - start for start, stop in ends])
        return [part.unflatten(0, (n, -1)) for part, n in zip(parts, sizes, strict=True)]
