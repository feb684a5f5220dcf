"""Kernel-level form of masks, and the conversion of a `Mask` to it.

`spec_of_mask` converts a `Mask` to a `MaskSpec`, which expresses every mask by a diagonal band, a
row of bounds for each sequence, document ids, dense tensors and ALiBi slopes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.flat import HOST, Flat, flattens
from fused_attn.base.shapes import TRANSPOSED
from fused_attn.base.torch_state import (
    host_readable,
    is_compiling,
    plain_eager,
    savable,
    statistics_dtype,
)
from fused_attn.masks.band import Band, band_with_lengths
from fused_attn.masks.fields import DIMENSIONS, Shape, unknown_fields
from fused_attn.masks.mask import UNLIMITED, Mask
from fused_attn.masks.mask_mod import resolved
from fused_attn.masks.memo import Memo, cacheable, recall, recall_eager

# Columns of `MaskSpec.bounds`. The order must match the C++ struct SequenceBounds (csrc/params.h).
BOUNDS = (
    "key_begin",
    "key_end",
    "query_begin",
    "query_end",
    "band_lo",
    "band_hi",
    "prefix_end",
    "alibi_offset",
)

_TABLES = (*(n for n, d in DIMENSIONS.items() if "k" not in d), "cu_seqlens_q", "cu_seqlens_k")


@flattens
@dataclass(eq=False)
class MaskSpec(Flat):
    """Kernel-level form of a mask, including the packing of sequences.

    The field order is the argument order of the registered ops. The C++ struct MaskParams
    (csrc/params.h) uses the same names.

    Attributes:
        bias: float, 4-D, broadcastable to (batch, num_heads, seqlen_q, seqlen_k). Added to the
            scores; -inf masks a position.
        bias_summary: uint8 tile summary of bias, see `with_summaries`.
        dense: bool, True = visible; shape as bias.
        dense_summary: uint8 tile summary of dense.
        key_mask: bool (batch or 1, num_heads or 1, 1, seqlen_k), True = visible.
        bounds: int64 (batch, 8), with the columns of `BOUNDS`. If set, it replaces band_lo, band_hi
            and alibi_offset.
        query_documents: int64 (batch or 1, seqlen_q), document ids, which must fit into int32.
        key_documents: int64 (batch or 1, seqlen_k), document ids as in query_documents.
        slopes: float32 (batch or 1, num_heads), ALiBi slopes.
        intervals: int64 (batch or 1, num_heads or 1, seqlen_q, 2), on a CPU only. Query i attends
            only to the keys in [intervals[..., i, 0], intervals[..., i, 1]).
        bits: int64 (batch or 1, num_heads or 1, seqlen_q or 1, ceil(seqlen_k / 64)), on a CPU only.
            Key k is visible if bit k % 64 of word k // 64 is set; other bits are arbitrary.
        cu_seqlens_q, cu_seqlens_k: int64 (batch + 1,), set for packed sequences. Query, key and
            value then have batch dimension 1, and their rows [cu_seqlens[b], cu_seqlens[b + 1]) are
            sequence b. All other fields describe the padded batch, with seqlen_q = max_seqlen_q
            and seqlen_k = max_seqlen_k.
        band_lo, band_hi: key j is visible to query i if band_lo <= j - i <= band_hi.
        alibi_offset: ALiBi adds -slope * |i + alibi_offset - j| to the scores.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths of packed sequences.
        by_query: False if `bounds` restricts only key_begin and key_end. Dense forms of the mask
            then need no query dimension.
        band: the part of the mask that `bounds` expresses, if the host knows it; see masks/band.py.
            It is not an argument of the ops.
        memo: cache of values derived from this spec, see `own_memo`; not an argument of the ops.
    """

    bias: Tensor | None = None
    bias_summary: Tensor | None = None
    dense: Tensor | None = None
    dense_summary: Tensor | None = None
    key_mask: Tensor | None = None
    bounds: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    slopes: Tensor | None = None
    intervals: Tensor | None = None
    bits: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    band_lo: int = -UNLIMITED
    band_hi: int = UNLIMITED
    alibi_offset: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    by_query: bool = True
    band: Band | None = field(default=None, metadata=HOST)
    memo: Memo | None = field(default=None, init=False, repr=False, metadata=HOST)

    @property
    def kind(self) -> str:
        """Most expensive part of the mask.

        One of "none", "causal" (top-left), "structured" (bands, lengths, documents, slopes),
        "dense" (a bool tensor) and "bias" (a float tensor), from cheapest to most expensive.
        """
        if self.bias is not None:
            return "bias"
        if not self.dense is self.key_mask is self.bits is None or unknown_fields(self):
            return "dense"
        tables = self.bounds, self.query_documents, self.slopes, self.intervals
        if any(table is not None for table in tables) or self.band_lo > -UNLIMITED:
            return "structured"
        if self.band_hi >= UNLIMITED:
            return "none"
        # Comparing symbolic lengths would restrict programs of torch.export to some lengths.
        return "causal" if isinstance(self.band_hi, int) and self.band_hi == 0 else "structured"

    def added_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype of the bias added to the scores; None if nothing is added.

        Args:
            dtype: dtype of query.
        """
        if self.slopes is not None:
            return statistics_dtype(dtype)
        return None if self.bias is None else self.bias.dtype

    def kernel_layout(self) -> MaskSpec:
        """Return this spec with contiguous tables, as kernels require."""
        plain = self.bounds is self.query_documents is self.slopes is self.cu_seqlens_q is None
        if plain and self.intervals is self.bits is None:
            return self
        tensors = {name: getattr(self, name) for name in _TABLES}
        apart = {
            n: t.contiguous() for n, t in tensors.items() if t is not None and not t.is_contiguous()
        }
        return replace(self, **apart) if apart else self

    def own_memo(self) -> Memo:
        """Return the cache of values derived from this spec. Copies of the spec do not share it."""
        if self.memo is None:
            if is_compiling():
                return {}
            self.memo = {}
        return self.memo

    def sizes(self, query: Tensor, key: Tensor) -> tuple[int, int, int]:
        """Return (batch, seqlen_q, seqlen_k).

        For packed sequences these are their number, max_seqlen_q and max_seqlen_k.
        """
        if self.cu_seqlens_q is None:
            return query.shape[0], query.shape[2], key.shape[2]
        return self.cu_seqlens_q.shape[0] - 1, self.max_seqlen_q, self.max_seqlen_k


NO_MASK = MaskSpec()
_CAUSAL = MaskSpec(band_hi=0)
_BIAS_TYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- Mask -> MaskSpec ---------------------------------------------------------------------------


def spec_of_mask(
    mask: Mask | None, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int,
    device: torch.device,
) -> MaskSpec:  # fmt: skip
    """Return the MaskSpec of a Mask for this shape and device, cached on the Mask.

    None means that every position is visible. On a GPU, `device` must have an index.

    Raises:
        ValueError: a tensor of the mask does not fit the shape, or is on another device.
    """
    if mask is None:
        return MaskSpec()
    shape = batch, num_heads, seqlen_q, seqlen_k
    key = shape, device
    return recall(mask.memo, key, mask.tensors(), device, lambda: _convert(mask, shape, device))


def bias_fits(spec: MaskSpec, dtype: torch.dtype) -> bool:
    """Return True if there is no bias, or its dtype is supported with a query of `dtype`."""
    return spec.bias is None or spec.bias.dtype in (dtype, *_BIAS_TYPES)


def spec_of(
    attn_mask: Tensor | Mask | None, is_causal: bool, query: Tensor, key: Tensor
) -> MaskSpec | None:
    """Return the MaskSpec of an unvalidated `attn_mask`; None if full validation is needed.

    The call must not be intercepted.
    """
    if attn_mask is None:
        return _CAUSAL if is_causal else NO_MASK
    if is_causal or query.is_nested or key.is_nested or query.dim() != 4 or key.dim() != 4:
        return None
    batch, num_heads, seqlen_q, _ = query.shape
    shape = (batch, num_heads, seqlen_q, key.shape[2])
    if isinstance(attn_mask, Mask):
        mask, tensors, device = attn_mask, attn_mask.tensors(), query.device
        if not cacheable(tensors):  # for example, a bias that requires grad
            return None
        try:
            spec = recall_eager(
                attn_mask.memo, (shape, device), tensors, device,
                lambda: _convert(mask, shape, device),
            )  # fmt: skip
        except ValueError:  # validation may report an error in an earlier argument instead
            return None
        return spec if spec.bias is None or bias_fits(spec, query.dtype) else None
    if type(attn_mask) is not Tensor or attn_mask.is_nested or attn_mask.layout != torch.strided:
        return None
    if attn_mask.device != query.device or attn_mask.is_neg() or not savable(attn_mask):
        return None
    try:
        attn_mask = _as_4d(attn_mask, shape)
    except ValueError:
        return None
    dtype = attn_mask.dtype
    if dtype == torch.bool:
        by_key = attn_mask.shape[2] == 1
        return MaskSpec(key_mask=attn_mask) if by_key else MaskSpec(dense=attn_mask)
    return MaskSpec(bias=attn_mask) if dtype in (query.dtype, torch.float32) else None


def _convert(mask: Mask, shape: Shape, device: torch.device) -> MaskSpec:
    batch, num_heads = shape[:2]
    mask = resolved(mask, shape, device)
    # Lengths, ids and slopes may also be on the CPU, because lists are converted to CPU tensors.
    tensors = mask.tensors()
    elsewhere = [t for t in tensors if t.device not in (device, torch.device("cpu"))]
    for tensor in (*elsewhere, *mask.dense_masks, *mask.biases, *mask.intervals, *mask.bits):
        if tensor.device != device:
            raise ValueError(f"attn_mask must be on {device} (like query), got {tensor.device}")
    if not all(map(savable, tensors)):
        mask = mask.mapped(torch.clone)
    key_masks: list[Tensor] = []
    dense_masks: list[Tensor] = []
    for tensor in mask.dense_masks:
        tensor = _as_4d(tensor, shape)
        (key_masks if tensor.shape[2] == 1 else dense_masks).append(tensor)
    biases = [_as_4d(tensor, shape) for tensor in mask.biases]
    if len(biases) > 1:  # a sum of 16-bit biases would be rounded
        biases = [b.to(statistics_dtype(b.dtype)) for b in biases]
    spec = MaskSpec(
        bias=reduced(biases, torch.add),
        dense=reduced(dense_masks, torch.logical_and),
        key_mask=reduced(key_masks, torch.logical_and),
        slopes=_slopes(mask, batch, num_heads, device),
        intervals=reduced(list(mask.intervals), _intersection),
        bits=reduced(list(mask.bits), torch.bitwise_and),
        **_documents_fields(mask, shape, device),
    )
    return replace(spec, **_bounds_fields(mask, shape, device))


def _bounds_fields(mask: Mask, shape: Shape, device: torch.device) -> dict:
    """Return the MaskSpec fields for bands, lengths, prefixes and the ALiBi offset.

    These are the scalar fields, or `bounds` and `by_query` if the mask has lengths or prefixes.
    """
    batch, _, seqlen_q, seqlen_k = shape
    columns: dict[str, Any] = {
        "key_begin": 0,
        "key_end": seqlen_k,
        "query_begin": 0,
        "query_end": seqlen_q,
        "band_lo": -UNLIMITED,
        "band_hi": UNLIMITED,
        "prefix_end": 0,
        "alibi_offset": 0,
    }
    neutral = dict(columns)
    for pad in mask.paddings:
        keys = _sequence_lengths("key_lengths", pad.key_lengths, batch, seqlen_k, device)
        queries: Any = seqlen_q
        if pad.query_lengths is not None:
            queries = _sequence_lengths("query_lengths", pad.query_lengths, batch, seqlen_q, device)
        if pad.side == "right":
            columns["key_end"] = _minimum(columns["key_end"], keys)
            columns["query_end"] = _minimum(columns["query_end"], queries)
        else:
            columns["key_begin"] = _maximum(columns["key_begin"], seqlen_k - keys)
            columns["query_begin"] = _maximum(columns["query_begin"], seqlen_q - queries)
    bottom_right = columns["key_end"] - columns["query_end"]
    for band in mask.bands:
        offset = bottom_right if band.align == "bottom_right" else 0
        offset = offset if band.offset is None else band.offset
        if band.left < UNLIMITED:
            columns["band_lo"] = _maximum(columns["band_lo"], offset - band.left)
        if band.right < UNLIMITED:
            columns["band_hi"] = _minimum(columns["band_hi"], offset + band.right)
    if mask.prefixes:
        prefixes = [
            _sequence_lengths("prefix_lengths", p, batch, seqlen_k, device) for p in mask.prefixes
        ]
        # Prefix masks combine to the shortest prefix. In bounds, a prefix_end of 0 means that there
        # is no prefix condition. An empty prefix is therefore stored as 1, which is equivalent,
        # because key 0 is visible to every query under a causal mask.
        columns["prefix_end"] = reduced(prefixes, torch.minimum).clamp(min=1)
    if mask.slopes:
        if len({a.align for a in mask.slopes}) > 1:
            raise ValueError("ALiBi masks that are combined must have the same align")
        if mask.slopes[0].align == "bottom_right":
            columns["alibi_offset"] = bottom_right
    # Do not test columns with isinstance(_, Tensor) here: under torch.jit.trace, sizes are 0-D
    # tensors.
    if not mask.paddings and not mask.prefixes:
        return {name: columns[name] for name in ("band_lo", "band_hi", "alibi_offset")}
    by_query = any(
        isinstance(value, Tensor) or value != neutral[name]
        for name, value in columns.items()
        if name not in ("key_begin", "key_end")
    )
    whole = [
        column if isinstance(column, Tensor) else torch.full((), column, device=device)
        for column in (columns[name] for name in BOUNDS)
    ]
    bounds = torch.stack([column.expand(batch) for column in whole], dim=1)
    described = band_with_lengths(mask, seqlen_q, seqlen_k)
    return {"bounds": bounds, "by_query": by_query, "band": described}


def _documents_fields(mask: Mask, shape: Shape, device: torch.device) -> dict:
    if not mask.document_pairs:
        return {}
    batch, _, seqlen_q, seqlen_k = shape
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    for pair in mask.document_pairs:
        for name, ids, seqlen, into in (
            ("query_ids", pair.query_ids, seqlen_q, queries),
            ("key_ids", pair.key_ids, seqlen_k, keys),
        ):
            ids = ids[None] if ids.dim() == 1 else ids
            if ids.shape[1] != seqlen or ids.shape[0] not in (1, batch):
                raise ValueError(
                    f"{name} must have shape ({batch}, {seqlen}) or ({seqlen},), "
                    f"got {tuple(ids.shape)}"
                )
            into.append(ids)
    if len({ids.device for ids in (*queries, *keys)}) > 1:
        queries, keys = ([ids.to(device) for ids in given] for given in (queries, keys))
    if len(queries) == 1:
        return _numbered(queries[0], keys[0], device)
    # With several document masks, a query and a key must have equal ids in all of them. Map each
    # distinct tuple of ids to one new id.
    stacked = [
        torch.cat([q.expand(batch, -1), k.expand(batch, -1)], dim=1).to(device, torch.int64)
        for q, k in zip(queries, keys, strict=True)
    ]
    tuples = torch.stack(stacked, dim=-1).reshape(-1, len(stacked))
    numbers = torch.unique(tuples, dim=0, return_inverse=True)[1].reshape(batch, -1)
    return {"query_documents": numbers[:, :seqlen_q], "key_documents": numbers[:, seqlen_q:]}


def _numbered(query_ids: Tensor, key_ids: Tensor, device: torch.device) -> dict:
    """Return the document fields, with ids in the range of int32, as kernels require.

    If ids are not known to be in range, each is replaced by its first index in the sorted ids,
    which does not synchronize with a GPU.
    """
    ids = [query_ids, key_ids]
    if not all(_fits(t) for t in ids):
        ids = [t.to(torch.int64) for t in ids]
        every = torch.cat([t.flatten() for t in ids]).sort().values
        ids = [torch.searchsorted(every, t.contiguous()) for t in ids]
    query_ids, key_ids = (t.to(device, torch.int64).contiguous() for t in ids)
    return {"query_documents": query_ids, "key_documents": key_ids}


def _fits(ids: Tensor) -> bool:
    """Return True if all ids are known to be in the range of int32."""
    if ids.numel() == 0 or torch.iinfo(ids.dtype).max < 1 << 31:
        return True
    return host_readable(ids) and int(ids.min()) >= -(1 << 31) and int(ids.max()) < 1 << 31


def _slopes(mask: Mask, batch: int, num_heads: int, device: torch.device) -> Tensor | None:
    total = None
    for alibi_ in mask.slopes:
        slopes = alibi_.slopes if alibi_.slopes.dim() == 2 else alibi_.slopes[None]
        if slopes.shape[1] != num_heads or slopes.shape[0] not in (1, batch):
            raise ValueError(
                f"slopes must have shape ({num_heads},) or ({batch}, {num_heads}), "
                f"got {tuple(alibi_.slopes.shape)}"
            )
        slopes = slopes.detach().resolve_neg().to(device=device, dtype=torch.float32)
        total = slopes if total is None else total + slopes
    return total


def _intersection(a: Tensor, b: Tensor) -> Tensor:
    lo, hi = torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])
    return torch.stack([lo, hi], dim=-1)


def _as_4d(tensor: Tensor, shape: Shape) -> Tensor:
    """Return a 4-D view in which all broadcast dimensions have size 1.

    Expanded (stride-0) dimensions are narrowed to size 1, too, unless the tensor requires grad.

    Raises:
        ValueError: the tensor is not broadcastable to `shape`.
    """
    if tensor.dim() > 4:
        raise ValueError(f"attn_mask must have at most 4 dimensions, got {tuple(tensor.shape)}")
    view = tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]
    for dim, (have, want) in enumerate(zip(view.shape, shape, strict=True)):
        if have != 1 and have != want:  # Dynamo does not support `in` for symbolic sizes
            # In self-attention, a transposed layout passes all earlier checks. The mask is the
            # first argument whose shape does not fit.
            swapped = shape[2] == shape[3] != shape[1] > 1
            fits = swapped and set(view.shape[2:]) in ({shape[1]}, {1, shape[1]})
            hint = TRANSPOSED if fits else ""
            raise ValueError(
                f"attn_mask must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k) = "
                f"{shape}, got {tuple(tensor.shape)}{hint}"
            )
        if have > 1 and view.stride(dim) == 0:
            # The gradient must have the expanded shape, so materialize a tensor that requires grad.
            view = view.contiguous() if view.requires_grad else view.narrow(dim, 0, 1)
    return view.resolve_neg()


def _sequence_lengths(
    name: str, lengths: Tensor, batch: int, limit: int, device: torch.device
) -> Tensor:
    if lengths.shape[0] != batch:
        raise ValueError(f"{name} must have shape ({batch},), got {tuple(lengths.shape)}")
    if host_readable(lengths) and lengths.numel() and int(lengths.max()) > limit:
        raise ValueError(f"{name} must be <= {limit}, got {int(lengths.max())}")
    return lengths.to(device=device, dtype=torch.int64).clamp(0, limit)


# ---- tile summaries -----------------------------------------------------------------------------

_SETTING = threading.Lock()


def with_summaries(spec: MaskSpec, summarize: Callable[[Tensor], Tensor | None]) -> MaskSpec:
    """Compute the tile summaries of the spec's dense tensors, once per spec, and return the spec.

    A summary classifies tiles of a mask, so that kernels can skip fully masked ones.

    Args:
        summarize: kernel of the backend; returns None if the backend does not use summaries.
    """
    if (spec.dense is None and spec.bias is None) or not plain_eager(spec.dense, spec.bias):
        return spec
    for name in ("dense", "bias"):
        tensor, summary = getattr(spec, name), getattr(spec, f"{name}_summary")
        if tensor is not None and summary is None:
            # A spec is otherwise immutable. If two threads compute the summary, the first one to
            # finish stores it; replacing it would free memory that a running kernel may read.
            summary = summarize(tensor.detach())
            with _SETTING:
                if getattr(spec, f"{name}_summary") is None:
                    setattr(spec, f"{name}_summary", summary)
    return spec


def _minimum(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    if isinstance(b, Tensor):
        return b.clamp(max=a)
    # min and max would add a guard on the comparison of symbolic values.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def _maximum(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def reduced(tensors: list[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Reduce the tensors to one with a binary function; return None for an empty list."""
    return functools.reduce(combine, tensors) if tensors else None
