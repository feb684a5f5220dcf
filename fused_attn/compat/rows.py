"""Indices of the rows of sequences that are stored with gaps or in pages."""

from __future__ import annotations

import torch
from torch import Tensor


def used_rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the first rows of each sequence: starts[b] to starts[b] + lengths[b] - 1."""
    lengths = lengths.long()
    shifts = starts - (lengths.cumsum(0) - lengths)
    shifts = shifts.repeat_interleave(lengths)
    return shifts + torch.arange(len(shifts), device=shifts.device)


def rows_of_pages(
    block_table: Tensor, page_size: int, lengths: Tensor, starts: Tensor | None = None
) -> Tensor:
    """Return the rows of each sequence in a tensor of all pages' rows.

    Args:
        block_table: (batch, max_pages) integers; the pages of each sequence.
        lengths: (batch,) integers; number of rows of each sequence.
        starts: (batch,) integers; first row of each sequence in its pages. None means 0.
    """
    capacity = block_table.shape[1] * page_size
    firsts = torch.arange(len(block_table), device=block_table.device) * capacity
    if starts is not None:
        firsts = firsts + starts.to(block_table.device)
    positions = used_rows(firsts, lengths.to(block_table.device))
    pages = block_table.flatten()[positions // page_size].long()
    return pages * page_size + positions % page_size
