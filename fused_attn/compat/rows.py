"""Indices of the rows of sequences that are stored with gaps or in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import host_readable
from fused_attn.call.validation import check_integers


def check_used(
    name: str, lengths: Tensor, capacity: Tensor | int, starts: Tensor | int = 0
) -> None:
    """Check that each sequence has rows starts[b] to starts[b] + lengths[b] - 1.

    Values are checked only if the host can read them.

    Args:
        name: name of lengths, for error messages.
        lengths: (batch,) integers.
        capacity: (batch,) or int; number of rows that are available to the sequence.
        starts: (batch,) or int.
    """
    check_integers(name, lengths)
    for other in (capacity, starts):
        if isinstance(other, Tensor) and other.shape != lengths.shape:
            shape = tuple(other.shape)
            raise ValueError(f"{name} must have shape {shape}, got {tuple(lengths.shape)}")
    if not all(host_readable(t) for t in (lengths, capacity, starts) if isinstance(t, Tensor)):
        return
    firsts = starts + torch.zeros_like(lengths)
    ends = firsts + lengths
    wrong = (ends > capacity) | (lengths < 0) | (firsts < 0)
    if wrong.any():
        first, end = int(firsts[wrong][0]), int(ends[wrong][0])
        most = int(capacity[wrong][0]) if isinstance(capacity, Tensor) else capacity
        raise ValueError(f"{name} must select rows in [0, {most}), got [{first}, {end})")


def used_rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the first rows of each sequence: starts[b] to starts[b] + lengths[b] - 1."""
    lengths = lengths.long()
    shifts = starts - (lengths.cumsum(0) - lengths)
    shifts = shifts.repeat_interleave(lengths)
    return shifts + torch.arange(len(shifts), device=shifts.device)


def rows_of_pages(
    block_table: Tensor,
    page_size: int,
    num_pages: int,
    name: str,
    lengths: Tensor,
    starts: Tensor | int = 0,
) -> Tensor:
    """Return the row indices of each sequence in a tensor of all pages' rows.

    Args:
        block_table: (batch, max_pages) integers; the pages of each sequence.
        name: name of lengths, for error messages.
        lengths: (batch,) integers; number of rows of each sequence.
        starts: (batch,) integers; first row of each sequence in its pages.
    """
    check_integers("block_table", block_table)
    if block_table.dim() != 2 or len(block_table) != len(lengths):
        shape = f"({len(lengths)}, max_pages)"
        raise ValueError(f"block_table must have shape {shape}, got {tuple(block_table.shape)}")
    device, capacity = block_table.device, block_table.shape[1] * page_size
    check_used(name, lengths, capacity, starts)
    firsts = torch.arange(len(block_table), device=device) * capacity
    firsts = firsts + (starts.to(device) if isinstance(starts, Tensor) else starts)
    positions = used_rows(firsts, lengths.to(device))
    pages = block_table.flatten()[positions // page_size].long()
    if host_readable(pages) and pages.numel() and not 0 <= pages.min() <= pages.max() < num_pages:
        got = f"{int(pages.min())} to {int(pages.max())}"
        raise ValueError(f"block_table must have pages in [0, {num_pages}), got {got}")
    return pages * page_size + positions % page_size
