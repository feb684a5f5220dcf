"""Masks as tables: the keys of each query as an interval or as bits, and their dense forms."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

TABLES = ("intervals", "bits")  # fields of a MaskSpec
WORD = 64  # bits of a word of `MaskSpec.bits`


def as_bits(visible: Tensor) -> Tensor:
    """Return bool (*, seqlen_k) as `MaskSpec.bits`, int64 (*, ceil(seqlen_k / 64))."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % WORD))
    bits = padded.unflatten(-1, (-1, 8)).to(torch.uint8) << _bit(visible)
    return bits.sum(-1, dtype=torch.uint8).view(torch.int64)


def shown_by_bits(bits: Tensor, seqlen_k: int) -> Tensor:
    """Return the keys that are visible in `MaskSpec.bits`, bool (*, seqlen_k)."""
    visible = bits.contiguous().view(torch.uint8)[..., None] >> _bit(bits) & 1
    return visible.to(torch.bool).flatten(-2)[..., :seqlen_k]


def shown_by_intervals(intervals: Tensor, seqlen_k: int) -> Tensor:
    """Return the keys in `MaskSpec.intervals`, bool (*, seqlen_q, seqlen_k)."""
    key = torch.arange(seqlen_k, device=intervals.device)
    return (key >= intervals[..., :1]) & (key < intervals[..., 1:])


def refuse_tables(spec: Any, what: str) -> None:
    """Raise NotImplementedError if a MaskSpec has tables, which `without_tables` converts."""
    if any(getattr(spec, name) is not None for name in TABLES):
        raise NotImplementedError(f"{what} does not support tables of masks: use without_tables")


def without_tables(spec: Any, seqlen_k: int, *, intervals: bool = True) -> Any:
    """Return the mask with its tables merged into `dense`.

    Args:
        spec: a MaskSpec, which is returned unchanged if it has no tables.
        intervals: also convert the intervals, not only the bits.
    """
    shown = [] if spec.bits is None else [shown_by_bits(spec.bits, seqlen_k)]
    if intervals and spec.intervals is not None:
        shown.append(shown_by_intervals(spec.intervals, seqlen_k))
    if not shown:
        return spec
    shown += [] if spec.dense is None else [spec.dense]
    dense, kept = functools.reduce(torch.logical_and, shown), None if intervals else spec.intervals
    return replace(spec, dense=dense, dense_summary=None, bits=None, intervals=kept)


def _bit(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
