"""Masks of a part of a call: some of its heads, sequences, or queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.masks.fields import DIMENSIONS, refuse_unknown_fields
from fused_attn.masks.mask import UNLIMITED
from fused_attn.masks.spec import BOUNDS, MaskSpec
from fused_attn.masks.tables import shown_by_bits


def of_heads(spec: MaskSpec, heads: slice) -> MaskSpec:
    """Return the mask of a slice of the query heads, with a step of 1."""
    refuse_unknown_fields(spec, "a shard of the heads")
    return replace(spec, **cut_tensors(spec, h=heads), bias_summary=None, dense_summary=None)


def of_sequences(spec: MaskSpec, sequences: slice) -> MaskSpec:
    """Return the mask of a slice of the sequences of a padded batch, with a step of 1."""
    refuse_unknown_fields(spec, "a shard of the batch")
    # `band` describes the lengths of all sequences.
    cut = cut_tensors(spec, b=sequences)
    return replace(spec, **cut, bias_summary=None, dense_summary=None, band=None)


def of_positions(
    spec: MaskSpec, queries: range, keys: range, sequence: int | None = None
) -> MaskSpec:
    """Return the mask of the queries and keys at some positions.

    A diagonal band moves by the difference of the first positions; tensors are sliced. With
    prefixes, the two ranges must be equal or disjoint, because a prefix ends in a causal mask that
    begins at the first query and the first key.

    Args:
        spec: the mask of the complete call.
        queries, keys: consecutive positions. For packed sequences, positions in the sequence.
        sequence: index of the sequence if sequences are packed, else None.
    """
    refuse_unknown_fields(spec, "a shard of the sequence")
    own = slice(None) if sequence is None else slice(sequence, sequence + 1)
    tensors = cut_tensors(
        spec, b=own, q=slice(queries.start, queries.stop), k=slice(keys.start, keys.stop)
    )
    if spec.bits is not None:
        shown = shown_by_bits(tensors.pop("bits"), keys.stop)[..., keys.start :]
        tensors["dense"] = shown if spec.dense is None else shown & tensors["dense"]
    if spec.intervals is not None:
        tensors["intervals"] = (tensors["intervals"] - keys.start).clamp(0, len(keys))
    offset = queries.start - keys.start
    if spec.bounds is None:
        lo, hi = _shifted(spec.band_lo, spec.band_hi, offset)
        alibi_offset = spec.alibi_offset + offset
        return MaskSpec(**tensors, band_lo=lo, band_hi=hi, alibi_offset=alibi_offset)
    tensors["bounds"] = _shifted_bounds(tensors["bounds"], queries, keys)
    return MaskSpec(**tensors, by_query=spec.by_query)


def without_first_keys(
    spec: MaskSpec, count: int, sizes: tuple[int, int, int], device: torch.device
) -> MaskSpec:
    """Return the mask without the first `count` keys. The mask must not have prefixes.

    Args:
        sizes: (batch, seqlen_q, seqlen_k) of the call.
        device: device of the call.
    """
    bounds = spec.bounds
    if bounds is None:
        batch, seqlen_q, seqlen_k = sizes
        row = {
            "key_end": seqlen_k,
            "query_end": seqlen_q,
            "band_lo": spec.band_lo,
            "band_hi": spec.band_hi,
            "alibi_offset": spec.alibi_offset,
        }
        bounds = torch.tensor([[row.get(name, 0) for name in BOUNDS]] * batch, device=device)
    bounds = bounds.clone()
    bounds[:, BOUNDS.index("key_begin")].clamp_(min=count)
    return replace(spec, bounds=bounds, by_query=True)


def cut_tensors(spec: MaskSpec, **parts: slice) -> dict[str, Any]:
    """Return all tensors of a mask, sliced in the dimensions that `parts` name (see DIMENSIONS)."""
    tensors = {}
    for name, letters in DIMENSIONS.items():
        tensor = getattr(spec, name)
        for dim, letter in enumerate(letters):
            part = parts.get(letter.lower())
            if part is None or tensor is None or (letter.islower() and tensor.shape[dim] == 1):
                continue
            tensor = tensor[(slice(None),) * dim + (part,)]
        tensors[name] = tensor
    return tensors


def _shifted(lo: int, hi: int, offset: int) -> tuple[int, int]:
    """Return a band lo <= j - i <= hi for positions relative to the first query and key."""
    lo = lo + offset if lo > -UNLIMITED else lo
    hi = hi + offset if hi < UNLIMITED else hi
    return max(lo, -UNLIMITED), min(hi, UNLIMITED)


def _shifted_bounds(bounds: Tensor, queries: range, keys: range) -> Tensor:
    """Return `MaskSpec.bounds` for positions relative to the first query and key."""
    column: dict[str, Any] = dict(zip(BOUNDS, bounds.unbind(1), strict=True))
    offset = queries.start - keys.start
    for name, part in (("query", queries), ("key", keys)):
        for side in ("begin", "end"):
            at = f"{name}_{side}"
            column[at] = (column[at] - part.start).clamp(0, len(part))
    for name in ("band_lo", "band_hi"):
        diagonal = column[name]
        column[name] = torch.where(diagonal.abs() < UNLIMITED, diagonal + offset, diagonal)
    column["alibi_offset"] = column["alibi_offset"] + offset
    prefix, none = column["prefix_end"], torch.zeros_like(column["prefix_end"])
    if queries == keys:  # key 0 is visible to every query, so 1 is an empty prefix
        column["prefix_end"] = torch.where(prefix > 0, (prefix - keys.start).clamp(min=1), none)
        return torch.stack([column[name] for name in BOUNDS], dim=1)
    if keys.start >= queries.stop:  # only the prefix is visible
        end = torch.minimum(column["key_end"], (prefix - keys.start).clamp(min=0))
        column["key_end"] = torch.where(prefix > 0, end, column["key_end"])
    column["prefix_end"] = none
    return torch.stack([column[name] for name in BOUNDS], dim=1)
