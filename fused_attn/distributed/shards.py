"""Global offsets of shards, for dropout masks that do not depend on the sharding.

The dropout mask is a function of positions (base/philox.py), which start at 0 in each call. A shard
is a call on some of the queries, keys, heads or sequences of a global call. Its offsets are added
to its positions, so it drops the same elements as the global call.
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
    """Return the `dropout_offsets` of a shard of an attention call.

    Args:
        batch: number of sequences in the shard, padded or packed.
        num_heads: number of query heads in the shard.
        row0: global position of the first query; an int for all sequences, or one per sequence.
        key0: global position of the first key, as row0. Must be a multiple of 8, because 8 adjacent
            keys share a Philox counter.
        head0: global index of the first head.
        num_heads_global: number of heads of the global call; None means num_heads.
        batch0: global index of the first sequence if sequences are consecutive, or the global index
            of each sequence.
        device: device of the shard's query.

    Returns:
        int64 (batch, 3): row0, key0, and batch0 * num_heads_global + head0, the head word of the
        Philox counter for the first head. Counters use the lower 32 bits of these values.

    Raises:
        ValueError: a value is negative, key0 is not a multiple of 8, the number of values is not
            batch, or a head index exceeds the global heads. Values of GPU tensors are not checked,
            because reading them would synchronize.
        TypeError: a position is not an integer.

    Example:
        >>> attention_offsets(2, 4, row0=64, head0=4, num_heads_global=8, device="cpu").tolist()
        [[64, 0, 4], [64, 0, 12]]
    """
    heads = num_heads if num_heads_global is None else num_heads_global
    for name, index in (("head0", head0), ("num_heads_global", heads)):
        if not isinstance(index, Integral) or isinstance(index, bool):
            raise TypeError(f"{name} must be an int, got {type(index).__name__}")
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
    """Return the `dropout_offsets` of a shard of a norm call.

    Args:
        runs: number of sequences in the shard, which all have the same number of rows.
        row0: global position of the first row in its sequence; an int for all sequences, or one per
            sequence.
        row_stride: number of rows of a global sequence.
        batch0: as in `attention_offsets`.
        device: device of the shard's input.

    Returns:
        int64 (runs,): global index of the first row of each sequence, row0 + batch0 * row_stride.

    Raises:
        ValueError, TypeError: as in `attention_offsets`.
    """
    if row_stride < 0:
        raise ValueError(f"row_stride must be >= 0, got {row_stride}")
    row = _of_each("row0", row0, runs, device)
    return row + _numbers("batch0", batch0, runs, device) * row_stride


def _numbers(name: str, positions: Positions, count: int, device: torch.device | str) -> Tensor:
    """Return the global index of each sequence, int64 (count,).

    If an int is given, it is the index of the first of consecutive sequences.
    """
    numbers = _of_each(name, positions, count, device)
    if isinstance(positions, Integral):
        return numbers + torch.arange(count, device=device)
    return numbers


def _of_each(
    name: str, positions: Positions, count: int, device: torch.device | str, multiple_of: int = 1
) -> Tensor:
    """Validate positions and convert them to int64 (count,), one for each sequence."""
    if isinstance(positions, Integral) and not isinstance(positions, bool):
        position = int(positions)
        _check(name, position, multiple_of)
        # Fill on the device: a copy from the host would synchronize and fail in a CUDA graph.
        return torch.full((count,), position, dtype=torch.int64, device=device)
    positions = torch.as_tensor(positions)
    if positions.dtype not in (torch.int32, torch.int64) and positions.numel() > 0:
        raise TypeError(f"{name} must be int32 or int64, got {positions.dtype}")
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
