"""Conversions and checks that the options of attention and of norm calls share."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

NUMBERS = frozenset({float, int})


def with_options(call: Any, **options: Any) -> Any:
    """Return a copy of an attention or norm call with some options replaced."""
    return replace(call, options=replace(call.options, **options))


def with_dense_offsets(options: Any) -> Any:
    """Return the options of a call with contiguous dropout_offsets, as kernels require."""
    offsets = options.dropout_offsets
    dense = offsets if offsets is None else offsets.contiguous()
    return options if dense is offsets else replace(options, dropout_offsets=dense)


def checked_number(name: str, value: object) -> float:
    """Convert a Python or NumPy number, or a scalar tensor, to a float.

    Symbolic numbers are returned unchanged.
    """
    if type(value) is float:
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise TypeError(f"{name} must not require grad: its gradient is not computed")
        if value.dim() or value.is_complex() or value.dtype == torch.bool:
            got = f"{value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{name} must be a float, got a {got}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    return float(value)


def checked_probability(dropout_p: float) -> float:
    """Convert dropout_p to a float; raise ValueError if it is not in [0, 1]."""
    dropout_p = checked_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    return dropout_p


def checked_seed(
    seed: int | Tensor | None, dropout_p: float, device: torch.device
) -> Tensor | None:
    """Validate a seed and convert it to an int64 scalar tensor on `device`.

    The result is None if there is no dropout, or if the seed is None and must be drawn.
    """
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim():
            got = f"{seed.dtype} tensor of shape {tuple(seed.shape)}"
            raise TypeError(f"seed must be an int or an int64 scalar tensor, got a {got}")
        if seed.device != device:
            raise ValueError(
                f"seed must have device {device} (like the other tensors), got {seed.device}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (Integral, torch.SymInt)):
            raise TypeError(
                f"seed must be an int or an int64 scalar tensor, got {type(seed).__name__}"
            )
        seed = seed if isinstance(seed, torch.SymInt) else int(seed)  # NumPy ints may overflow
        if not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
    if seed is None or dropout_p == 0.0:
        return None
    if isinstance(seed, Tensor):
        return seed
    # Reinterpret the bits as int64: seeds from 2^63 on become negative.
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    # torch.tensor would copy from the host, which synchronizes and fails in a CUDA graph.
    return torch.full((), signed, dtype=torch.int64, device=device)
