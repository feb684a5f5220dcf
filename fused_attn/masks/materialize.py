"""Materialization of masks as dense (batch, num_heads, seqlen_q, seqlen_k) tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.masks.fields import Shape, refuse_unknown_fields
from fused_attn.masks.mask import UNLIMITED, Mask
from fused_attn.masks.restrict import cut_tensors
from fused_attn.masks.spec import BOUNDS, MaskSpec, reduced, spec_of_mask
from fused_attn.masks.tables import shown_by_bits, shown_by_intervals


def materialize(
    spec: MaskSpec,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    dtype: torch.dtype,
    first_row: int = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """Materialize the mask as dense tensors on `device`.

    Args:
        dtype: dtype in which ALiBi biases are computed.
        first_row: position of the first query, if the seqlen_q rows are a part of the mask.

    Returns:
        The visible positions (bool) and the additive bias (float), both broadcastable to (batch,
        num_heads, seqlen_q, seqlen_k). The first is None if every position is visible, the second
        if nothing is added to the scores.
    """
    refuse_unknown_fields(spec, "the reference")
    row = torch.arange(first_row, first_row + seqlen_q, device=device)[None, None, :, None]
    column = torch.arange(seqlen_k, device=device)
    distance = column - row
    if spec.bounds is None:
        offset: Any = spec.alibi_offset
        conditions = []
        if spec.band_lo > -UNLIMITED:
            conditions.append(distance >= spec.band_lo)
        if spec.band_hi < UNLIMITED:
            conditions.append(distance <= spec.band_hi)
    else:
        # Each bound has shape (batch, 1, 1, 1).
        bound = dict(zip(BOUNDS, spec.bounds[:, :, None, None, None].unbind(1), strict=True))
        offset = bound["alibi_offset"]
        conditions = [(column >= bound["key_begin"]) & (column < bound["key_end"])]
        if spec.by_query:
            in_prefix = (column < bound["prefix_end"]) | (distance <= 0)
            conditions += [
                (row >= bound["query_begin"]) & (row < bound["query_end"]),
                (distance >= bound["band_lo"]) & (distance <= bound["band_hi"]),
                in_prefix | (bound["prefix_end"] == 0),
            ]
    if spec.query_documents is not None and spec.key_documents is not None:
        pairs = spec.query_documents[:, :, None] == spec.key_documents[:, None, :]
        conditions.append(pairs[:, None])
    conditions += [m for m in (spec.dense, spec.key_mask) if m is not None]
    if spec.intervals is not None:
        conditions.append(shown_by_intervals(spec.intervals, seqlen_k))
    if spec.bits is not None:
        conditions.append(shown_by_bits(spec.bits, seqlen_k))
    bias_ = spec.bias
    if bias_ is not None:
        conditions.append(bias_ != float("-inf"))
    if spec.slopes is not None:
        linear = -spec.slopes[:, :, None, None].to(dtype) * (row + offset - column).abs()
        bias_ = linear if bias_ is None else bias_ + linear
    return reduced(conditions, torch.logical_and), bias_


def _visible_rows(mask: Mask, shape: Shape, rows: range | slice, device: torch.device) -> Tensor:
    """Return the mask of a row range: bool, broadcastable to (batch, heads, rows, seqlen_k)."""
    batch, heads, _, seqlen_k = shape
    spec = spec_of_mask(mask, *shape, device)
    start, count = rows.start, rows.stop - rows.start
    spec = replace(spec, **cut_tensors(spec, q=slice(start, rows.stop)))
    visible, _ = materialize(
        spec, batch, heads, count, seqlen_k, device, torch.float32, first_row=start
    )
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if visible is None else visible


Mask._visible_rows = _visible_rows


def sizes_of(mask: Mask) -> tuple[int, int]:
    """Return the batch size and the number of heads of the mask's tensors; 1 if broadcast."""
    batch, heads = [1], [1]
    batch += [len(p.key_lengths) for p in mask.paddings] + [len(p) for p in mask.prefixes]
    for pair in mask.document_pairs:
        batch += [len(ids) for ids in (pair.query_ids, pair.key_ids) if ids.dim() == 2]
    for tensor in (*mask.dense_masks, *mask.biases, *mask.intervals, *mask.bits):
        batch += list(tensor.shape[-4:-3]) if tensor.dim() > 3 else []
        heads += list(tensor.shape[-3:-2]) if tensor.dim() > 2 else []
    for united in (m for masks in mask.mask_mods if isinstance(masks, tuple) for m in masks):
        size = sizes_of(united)
        batch.append(size[0])
        heads.append(size[1])
    for alibi in mask.slopes:
        batch += list(alibi.slopes.shape[:-1])
        heads.append(alibi.slopes.shape[-1])
    return max(batch), max(heads)
