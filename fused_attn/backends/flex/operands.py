"""Tensors that FlexAttention's mask and score functions read, for a call's mask.

All parts of a mask become tensors, so that new values or lengths need no compilation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fused_attn.call.attention import AttentionCall
from fused_attn.masks.fields import DIMENSIONS
from fused_attn.masks.intervals import BlockLists, Rows, block_lists, intervals_of, unmasked_keys
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import MaskSpec

BlockSize = tuple[int, int]
_CACHED = 8  # shapes cached for a mask; the block lists are small


class Operands(NamedTuple):
    """Tensors that mask_mod and score_mod index; None if the mask does not need one.

    Dimensions of size 1 are removed from each tensor. `Pattern` names the remaining ones.

    Attributes:
        lists: visible blocks; None if every position is visible.
        begin, end: the interval of visible keys of each query row.
        query_documents, key_documents, key_mask, dense: conditions that the intervals do not
            express, see `masks.intervals.Intervals`.
        bias: added to the scores.
        slopes, diagonal: ALiBi adds -slopes * |diagonal - key|.
        sequence, position, first_key: see `masks.intervals.Rows`; for packed sequences if `dense`,
            `bias` or `slopes` is indexed by sequence.
        unmasked: bool (1 or batch, 1 or num_heads_kv, seqlen_k), False for keys that no query
            attends to; None if no such key can affect the result by a NaN.
    """

    lists: BlockLists | None = None
    begin: Tensor | None = None
    end: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    key_mask: Tensor | None = None
    dense: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    diagonal: Tensor | None = None
    sequence: Tensor | None = None
    position: Tensor | None = None
    first_key: Tensor | None = None
    unmasked: Tensor | None = None


class Pattern(NamedTuple):
    """Index dimensions of each operand, as letters of "bhqk"; "" if the mask has no such operand.

    A pattern is part of the key of compiled functions.
    """

    begin: str = ""
    query_documents: str = ""
    key_documents: str = ""
    key_mask: str = ""
    dense: str = ""
    bias: str = ""
    slopes: str = ""
    diagonal: str = ""
    packed: bool = False
    clears: bool = False


class _Structure(NamedTuple):
    """Values derived from a mask's tensors. They must not reference these tensors.

    Attributes:
        tables: begin, end and the conditions of Operands; None represents the mask's tensor itself.
        rows: see masks/intervals.py.
        lists, unmasked: see Operands.
    """

    tables: dict[str, Tensor | None]
    rows: Rows | None
    lists: BlockLists
    unmasked: Tensor | None


def operands_of(call: AttentionCall, block_size: BlockSize) -> tuple[Operands, Pattern]:
    """Return the operands of a call's mask and their Pattern; cached on the MaskSpec.

    A Mask caches its MaskSpec, so the layers of a model share the operands.
    """
    spec, key = call.mask, call.key
    memo_key = ("flex operands", key.device, block_size, call.query.shape[:3], key.shape[1:3])
    tensors = [t for t in spec.tensors() if t is not None]
    return recall(
        spec.own_memo(), memo_key, tensors, key.device, lambda: _operands(call, block_size)
    )


def _operands(call: AttentionCall, block_size: BlockSize) -> tuple[Operands, Pattern]:
    spec, rows = call.mask, None
    lists = unmasked = None
    tensors: dict[str, Tensor] = {}
    if _masks_positions(spec):
        tables, rows, lists, unmasked = _structure_of(spec, call, block_size)
        tensors = {n: getattr(spec, n) if made is None else made for n, made in tables.items()}
    if spec.bias is not None:
        tensors["bias"] = spec.bias
    if spec.slopes is not None:
        tensors["slopes"], tensors["diagonal"] = spec.slopes, _diagonal(spec, call, rows)
    by_sequence = rows is not None and not tensors.keys().isdisjoint(("dense", "bias", "slopes"))
    found: dict[str, Tensor] = {}
    letters: dict[str, str] = {}
    for name, tensor in tensors.items():
        found[name], letters[name] = _without_ones(tensor, _LETTERS[name], call)
    letters.pop("end", None)
    pattern = Pattern(**letters, packed=by_sequence, clears=unmasked is not None)
    if by_sequence and rows is not None:
        found.update(rows._asdict())
    return Operands(lists=lists, unmasked=unmasked, **found), pattern


_LETTERS = {name: dims.lower() for name, dims in DIMENSIONS.items()}
_LETTERS |= dict.fromkeys(("begin", "end", "diagonal"), "bq")


def dimensions(pattern: Pattern, operands: Operands) -> list[tuple[Tensor, str]]:
    """Return each operand, except `lists`, with the letters of its dimensions."""
    letters = {
        **pattern._asdict(),
        "end": pattern.begin,
        **dict.fromkeys(Rows._fields, "q"),
        "unmasked": "bhk",
    }
    given = operands._asdict().items()
    return [(t, letters[name]) for name, t in given if isinstance(t, Tensor)]


def _masks_positions(spec: MaskSpec) -> bool:
    """Return True if anything other than the bias can mask a position."""
    return spec.cu_seqlens_q is not None or replace(spec, bias=None, slopes=None).kind != "none"


def _structure_of(spec: MaskSpec, call: AttentionCall, block_size: BlockSize) -> _Structure:
    """Return the structure of a call's mask, cached on the mask's tensors."""
    query, key = call.query, call.key
    shape = (*query.shape[:3], key.shape[2])
    heads, device = key.shape[1], query.device
    # A learned bias changes in each training step; its -inf is applied by score_mod alone.
    bias = None if spec.bias is None or spec.bias.requires_grad else spec.bias
    spec = replace(spec, bias=bias, bias_summary=None, dense_summary=None, slopes=None)

    def make() -> _Structure:
        intervals = intervals_of(spec, shape, device)
        tables: dict[str, Tensor | None] = {"begin": intervals.begin, "end": intervals.end}
        for name in ("query_documents", "key_documents", "key_mask", "dense"):
            tensor = getattr(intervals.rest, name)
            if tensor is not None:
                tables[name] = None if tensor is getattr(spec, name) else tensor
        unmasked = unmasked_keys(intervals, heads) if _clears(spec, shape) else None
        return _Structure(tables, intervals.rows, block_lists(intervals, block_size), unmasked)

    tensors = [t for t in spec.tensors() if t is not None]
    memo_key = ("flex", device, block_size, shape, heads, spec.band_lo, spec.band_hi, spec.by_query)
    return recall_on_tensor(tensors[0], memo_key, tensors, make, _CACHED) if tensors else make()


def _clears(spec: MaskSpec, shape: tuple[int, ...]) -> bool:
    """Return True if a key that no query attends to may be in a block with visible positions.

    FlexAttention multiplies its value by a weight of 0, and 0 * NaN is NaN. Packed sequences have
    no padding, and documents in self-attention have a query for each key. Zeroing would read and
    write key and value unnecessarily.
    """
    if spec.cu_seqlens_q is not None:
        return spec.key_mask is not None
    if any(table is not None for table in (spec.bounds, spec.key_mask, spec.dense)):
        return True
    return spec.band_lo > 0 or shape[2] - 1 + spec.band_hi < shape[3] - 1


def _diagonal(spec: MaskSpec, call: AttentionCall, rows: Rows | None) -> Tensor:
    """Return the key at which each query has no ALiBi penalty, int32 (1 or batch, seqlen_q)."""
    device = call.query.device
    offset = spec.alibi_offset if spec.bounds is None else spec.bounds[:, -1:]
    if rows is None:
        return (torch.arange(call.query.shape[2], device=device)[None] + offset).to(torch.int32)
    if isinstance(offset, Tensor):
        offset = offset[rows.sequence, 0]
    return (rows.position + rows.first_key + offset).to(torch.int32)[None]


def _without_ones(tensor: Tensor, letters: str, call: AttentionCall) -> tuple[Tensor, str]:
    """Return the tensor without its dimensions of size 1, and the letters of the others.

    A tensor of one element keeps its last dimension, expanded to the number of keys if that is the
    dimension of keys: FlexAttention cannot index a 0-D tensor that requires grad.
    """
    sizes = tensor.shape
    kept = [dim for dim, size in enumerate(sizes) if size > 1]
    if not kept:
        kept = [len(sizes) - 1]
        if letters[-1] == "k":
            tensor = tensor.expand(*sizes[:-1], call.key.shape[2])
    named = "".join(letters[dim] for dim in kept)
    return tensor.reshape([tensor.shape[dim] for dim in kept]), named
