"""Packed sequences: where each lies, and a padded batch of them for the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn._modes import readable


def check_cu_seqlens(name: str, cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
    """Raises ValueError where sequences do not fill the rows [0, total), or one is too long.

    Values are looked at only where that costs nothing: not on a GPU, not in a graph.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    if not readable(cu_seqlens):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if (first, last) != (0, total):
        raise ValueError(f"{name} must go from 0 to {total}, got {first} to {last}")
    lengths = cu_seqlens.diff()
    if lengths.numel() == 0:
        return
    shortest, longest = (int(x) for x in torch.aminmax(lengths))
    if shortest < 0 or longest > max_seqlen:
        raise ValueError(
            f"{name} must have steps in [0, {max_seqlen}], got [{shortest}, {longest}]"
        )


def pad(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """(1, heads, total, dim) to (batch, heads, max_seqlen, dim); what fills up may be anything."""
    total = packed.shape[2]
    position = torch.arange(max_seqlen, device=packed.device)
    index = cu_seqlens[:-1, None] + position
    if total == 0:
        return packed.new_zeros(*index.shape, *packed.shape[1::2]).transpose(1, 2)
    return packed[0][:, index.clamp(max=total - 1)].transpose(0, 1)


def unpad(padded: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """(batch, heads, max_seqlen, ...) to (1, heads, total, ...)."""
    batch, num_heads, max_seqlen = padded.shape[:3]
    row = torch.arange(total, device=padded.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    index = sequence * max_seqlen + row - cu_seqlens[sequence]
    rows = padded.transpose(0, 1).reshape(num_heads, batch * max_seqlen, *padded.shape[3:])
    return rows[:, index][None]
