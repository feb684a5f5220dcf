"""Where a shard lies in its whole: what a call carries to drop what the whole call would.

Dropout is decided by positions (philox.py), and those in a call's tensors begin at 0. The call of
some queries, keys, heads or sequences of a larger one has an offsets, which is added to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from fused_attn.base.philox import DECISIONS
from fused_attn.base.torch_state import host_readable

Positions = int | Sequence[int] | Tensor


def attention_offsets(
    batch: int,
    num_heads: int,
    *,
    row0: Positions = 0,
    key0: Positions = 0,
    head0: int = 0,
    num_heads_global: int | None = None,
    batch0: Positions = 0,
    device: torch.device | str,
) -> Tensor:
    """The `dropout_offsets` of an AttentionCall.

    Args:
        batch: number of sequences; of packed ones, all of them.
        num_heads: of the call's query.
        row0: the first query's position in its whole sequence, or that of each sequence.
        key0: the first key's, likewise; a multiple of 8, as many as share a counter.
        head0: the first head's number among those of the whole.
        num_heads_global: heads of the whole; None: num_heads.
        batch0: the first sequence's number in the whole batch, in which the others follow; or the
            number of each sequence.
        device: of the call's query.

    Returns:
        int64 (batch, 3): row0, key0, and the counter of the first head, which is
        batch0 * num_heads_global + head0. Counters have the lower 32 bits of what they count.

    Raises:
        ValueError: a number is negative, key0 is no multiple of 8, there is not one for each
            sequence, or the whole has not so many heads. Of tensors on a GPU no values are looked
            at, which would wait for it.
        TypeError: a position is no integer.

    Example:
        >>> attention_offsets(2, 4, row0=64, head0=4, num_heads_global=8, device="cpu").tolist()
        [[64, 0, 4], [64, 0, 12]]
    """
    heads = num_heads if num_heads_global is None else num_heads_global
    for name, given in (("head0", head0), ("num_heads_global", heads)):
        if not isinstance(given, Integral) or isinstance(given, bool):
            raise TypeError(f"{name} must be an int, got {type(given).__name__}")
    if heads < num_heads:
        raise ValueError(f"num_heads_global must be at least num_heads ({num_heads}), got {heads}")
    if not 0 <= head0 <= heads - num_heads:
        whole = f"{num_heads} of {heads} heads"
        raise ValueError(f"head0 must be in [0, {heads - num_heads}] for {whole}, got {head0}")
    row = _of_each("row0", row0, batch, device)
    key = _of_each("key0", key0, batch, device, multiple_of=DECISIONS)
    number = _numbers("batch0", batch0, batch, device)
    return torch.stack([row, key, number * heads + head0], dim=1)


def norm_offsets(
    runs: int,
    *,
    row0: Positions = 0,
    row_stride: int,
    batch0: Positions = 0,
    device: torch.device | str,
) -> Tensor:
    """The `dropout_offsets` of a NormCall.

    Args:
        runs: sequences that the rows are of, equally many of each.
        row0: the first row's position in its whole sequence, or that of each sequence.
        row_stride: rows of a whole sequence.
        batch0: as in `attention_offsets`.
        device: of the call's input.

    Returns:
        int64 (runs,): of each run the number of its first row among all rows of the whole,
        row0 + batch0 * row_stride.

    Raises:
        ValueError, TypeError: as in `attention_offsets`.
    """
    if row_stride < 0:
        raise ValueError(f"row_stride must be >= 0, got {row_stride}")
    row = _of_each("row0", row0, runs, device)
    return row + _numbers("batch0", batch0, runs, device) * row_stride


def _numbers(name: str, given: Positions, count: int, device: torch.device | str) -> Tensor:
    """The numbers of sequences: given, or the first and those that follow."""
    numbers = _of_each(name, given, count, device)
    if isinstance(given, Integral):
        return numbers + torch.arange(count, device=device)
    return numbers


def _of_each(
    name: str, given: Positions, count: int, device: torch.device | str, multiple_of: int = 1
) -> Tensor:
    """int64 (count,): a position for each sequence, checked."""
    if isinstance(given, Integral) and not isinstance(given, bool):
        position = int(given)
        _check(name, position, multiple_of)
        # A copy from the host would wait for the GPU, and is not allowed in a CUDA graph.
        return torch.full((count,), position, dtype=torch.int64, device=device)
    positions = torch.as_tensor(given)
    if positions.dtype not in (torch.int32, torch.int64) and positions.numel() > 0:
        raise TypeError(f"{name} must be integers, got {positions.dtype}")
    if positions.shape != (count,):
        got = tuple(positions.shape)
        raise ValueError(f"{name} must be an int or have shape ({count},), got {got}")
    if host_readable(positions):
        for position in positions.tolist():
            _check(name, position, multiple_of)
    return positions.to(device, torch.int64)


def _check(name: str, position: int, multiple_of: int) -> None:
    if position < 0:
        raise ValueError(f"{name} must be >= 0, got {position}")
    if position >= 2**63:
        raise ValueError(f"{name} must be < 2**63, got {position}")
    if position % multiple_of:
        raise ValueError(f"{name} must be a multiple of {multiple_of}, got {position}")
