"""Kernel-level form of masks: `normalize` converts a `Mask` to a `MaskSpec`.

A diagonal band, a row of bounds for each sequence, document ids, dense tensors and slopes express
every mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.flat import Flat, flattens
from fused_attn.base.shapes import TRANSPOSED
from fused_attn.base.torch_state import host_readable, plain_eager, savable, statistics_dtype
from fused_attn.masks.mask import UNLIMITED, Mask
from fused_attn.masks.memo import cacheable, recall, recall_eager

# Columns of `MaskSpec.bounds`; the C++ struct SequenceBounds (csrc/params.h) has the same order.
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


@flattens
@dataclass(eq=False)
class MaskSpec(Flat):
    """Kernel-level form of a mask, and the packing of sequences.

    Field order is the argument order of the registered ops, and the C++ struct MaskParams
    (csrc/params.h) has the same names.

    Attributes:
        bias: float tensor added to the scores; -inf masks. 4-D: each dimension of (batch,
            num_heads, seqlen_q, seqlen_k) has its full size or 1.
        bias_summary: uint8, see `with_summaries`.
        dense: bool tensor, True = visible; broadcastable as `bias` is.
        dense_summary: uint8, as `bias_summary`.
        key_mask: bool tensor (batch or 1, num_heads or 1, 1, seqlen_k).
        bounds: int64 (batch, 8), the columns of `BOUNDS`; replaces the three integers below.
        query_documents: int64 (batch or 1, seqlen_q), with values in the range of int32.
        key_documents: int64 (batch or 1, seqlen_k), as query_documents.
        slopes: float32 (batch or 1, num_heads), ALiBi.
        cu_seqlens_q, cu_seqlens_k: int64 (batch + 1); rows [cu_seqlens[b], cu_seqlens[b + 1]) of
            query, key and value are sequence b, and their batch dimension is 1. All other fields
            are per sequence, with the maxima below as seqlen_q and seqlen_k.
        band_lo, band_hi: band_lo <= j - i <= band_hi is visible.
        alibi_offset: ALiBi adds -slope * |i + alibi_offset - j|.
        max_seqlen_q, max_seqlen_k: number of rows of the longest packed sequence.
        by_query: False if `bounds` sets only key_begin and key_end; dense forms of the mask then
            need no query dimension.
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
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    band_lo: int = -UNLIMITED
    band_hi: int = UNLIMITED
    alibi_offset: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    by_query: bool = True

    @property
    def kind(self) -> str:
        """Most expensive part of the mask: "none", "causal" (top-left), "structured" (bands,
        lengths, documents, slopes), "dense" (a bool tensor) or "bias" (a float tensor)."""
        if self.bias is not None:
            return "bias"
        if self.dense is not None or self.key_mask is not None:
            return "dense"
        tables = self.bounds, self.query_documents, self.slopes
        if any(table is not None for table in tables) or self.band_lo > -UNLIMITED:
            return "structured"
        if self.band_hi >= UNLIMITED:
            return "none"
        return "causal" if self.band_hi == 0 else "structured"

    def hides(self) -> bool:
        """Return True if any part other than `bias` may hide keys or add to the scores."""
        whole = replace(self, bias=None, bias_summary=None, cu_seqlens_q=None, cu_seqlens_k=None)
        return whole.kind != "none"

    def added_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype of the terms added to the scores for a query of `dtype`, or None."""
        if self.slopes is not None:
            return statistics_dtype(dtype)
        return None if self.bias is None else self.bias.dtype

    def kernel_layout(self) -> MaskSpec:
        """Return this spec with its index tensors contiguous, as kernels require."""
        if self.bounds is None and self.query_documents is None and self.cu_seqlens_q is None:
            return self
        names = ("bounds", "query_documents", "key_documents", "cu_seqlens_q", "cu_seqlens_k")
        tensors = {name: getattr(self, name) for name in names}
        apart = {
            n: t.contiguous() for n, t in tensors.items() if t is not None and not t.is_contiguous()
        }
        return replace(self, **apart) if apart else self

    def sizes(self, query: Tensor, key: Tensor) -> tuple[int, int, int]:
        """Return batch, seqlen_q and seqlen_k; if packed, the count and maximum lengths."""
        if self.cu_seqlens_q is None:
            return query.shape[0], query.shape[2], key.shape[2]
        return self.cu_seqlens_q.shape[0] - 1, self.max_seqlen_q, self.max_seqlen_k


NO_MASK = MaskSpec()
_CAUSAL = MaskSpec(band_hi=0)
_BIAS_TYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- Mask -> MaskSpec ---------------------------------------------------------------------------


def normalize(
    mask: Mask | None, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, query: Tensor
) -> MaskSpec:
    """Return the MaskSpec of `mask` for this shape, cached on the Mask."""
    if mask is None:
        return MaskSpec()
    shape, device = (batch, num_heads, seqlen_q, seqlen_k), query.device
    key = (shape, device)
    return recall(mask.memo, key, mask.tensors(), device, lambda: _normalize(mask, shape, device))


def bias_fits(spec: MaskSpec, dtype: torch.dtype) -> bool:
    """Return True if the dtype of the bias is supported with a query of `dtype`."""
    return spec.bias is None or spec.bias.dtype in (dtype, *_BIAS_TYPES)


def spec_of(
    attn_mask: Tensor | Mask | None, is_causal: bool, query: Tensor, key: Tensor
) -> MaskSpec | None:
    """Return the MaskSpec of an unvalidated `attn_mask`, in a call that is not intercepted; None if
    validation is needed."""
    if attn_mask is None:
        return _CAUSAL if is_causal else NO_MASK
    if is_causal or query.is_nested or key.is_nested or query.dim() != 4 or key.dim() != 4:
        return None
    batch, num_heads, seqlen_q, _ = query.shape
    shape = (batch, num_heads, seqlen_q, key.shape[2])
    if isinstance(attn_mask, Mask):
        mask, tensors, device = attn_mask, attn_mask.tensors(), query.device
        if not cacheable(tensors):  # requires grad, or a subclass: validation handles it
            return None
        try:
            spec = recall_eager(
                attn_mask.memo, (shape, device), tensors, device,
                lambda: _normalize(mask, shape, device),
            )  # fmt: skip
        except ValueError:  # validation may find an invalid tensor first
            return None
        return spec if spec.bias is None or bias_fits(spec, query.dtype) else None
    if type(attn_mask) is not Tensor or attn_mask.is_nested or attn_mask.layout != torch.strided:
        return None
    if attn_mask.device != query.device or attn_mask.is_neg():
        return None
    if not savable(attn_mask) or attn_mask.dim() > 4:
        return None
    if attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    sizes = zip(attn_mask.shape, shape, attn_mask.stride(), strict=True)
    for dim, (have, want, stride) in enumerate(sizes):
        if have == 1:
            continue
        if have != want or (stride == 0 and attn_mask.requires_grad):
            return None
        if stride == 0:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    dtype = attn_mask.dtype
    if dtype == torch.bool:
        by_key = attn_mask.shape[2] == 1
        return MaskSpec(key_mask=attn_mask) if by_key else MaskSpec(dense=attn_mask)
    return MaskSpec(bias=attn_mask) if dtype in (query.dtype, torch.float32) else None


def _normalize(mask: Mask, shape: tuple[int, int, int, int], device: torch.device) -> MaskSpec:
    batch, num_heads = shape[:2]
    all_savable = True
    for tensor in mask.tensors():
        lengths_on_cpu = tensor.dim() == 1 and tensor.device.type == "cpu"
        if tensor.device != device and not lengths_on_cpu:
            raise ValueError(f"attn_mask must be on {device} (as query), got {tensor.device}")
        all_savable = all_savable and savable(tensor)
    if not all_savable:
        mask = mask.mapped(torch.clone)
    key_masks: list[Tensor] = []
    dense_masks: list[Tensor] = []
    for tensor in mask.dense_masks:
        tensor = _as_4d("attn_mask", tensor, shape)
        (key_masks if tensor.shape[2] == 1 else dense_masks).append(tensor)
    biases = [_as_4d("attn_mask", tensor, shape) for tensor in mask.biases]
    if len(biases) > 1:  # a sum of 16-bit biases would be rounded
        biases = [b.to(statistics_dtype(b.dtype)) for b in biases]
    spec = MaskSpec(
        bias=reduced(biases, torch.add),
        dense=reduced(dense_masks, torch.logical_and),
        key_mask=reduced(key_masks, torch.logical_and),
        slopes=_slopes(mask, batch, num_heads, device),
        **_documents_fields(mask, shape),
    )
    return replace(spec, **_bounds_fields(mask, shape, device))


def _bounds_fields(mask: Mask, shape: tuple[int, int, int, int], device: torch.device) -> dict:
    """Return the fields for bands, lengths and prefixes: scalars, or the (batch, 8) bounds."""
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
        if band.left < UNLIMITED:
            columns["band_lo"] = _maximum(columns["band_lo"], offset - band.left)
        if band.right < UNLIMITED:
            columns["band_hi"] = _minimum(columns["band_hi"], offset + band.right)
    if mask.prefixes:
        prefixes = [
            _sequence_lengths("prefix_lengths", p, batch, seqlen_k, device) for p in mask.prefixes
        ]
        # Two prefix masks combine to the shorter prefix. In the table, 0 means "no prefix
        # condition". An empty prefix (plain causal) is stored as 1, which is equivalent: key 0 is
        # visible to query 0 anyway.
        columns["prefix_end"] = reduced(prefixes, torch.minimum).clamp(min=1)
    if mask.slopes:
        if len({a.align for a in mask.slopes}) > 1:
            raise ValueError("alibi masks that are combined must have the same align")
        if mask.slopes[0].align == "bottom_right":
            columns["alibi_offset"] = bottom_right
    # Checking for tensors would not work: under torch.jit.trace sizes are 0-D tensors.
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
    return {"bounds": bounds, "by_query": by_query}


def spec_of_ends(ends: Sequence[int], seqlen_q: int, is_causal: bool) -> MaskSpec:
    """Build the spec for sequences with `ends` keys, optionally with a bottom-right causal mask.

    Equals the result of `normalize`, but is faster for small steps on CPUs.
    """
    columns = {"query_end": seqlen_q, "band_lo": -UNLIMITED, "band_hi": UNLIMITED}
    rows = []
    for end in ends:
        columns["key_end"] = end
        if is_causal:
            columns["band_hi"] = end - seqlen_q
        rows.append([columns.get(name, 0) for name in BOUNDS])
    return MaskSpec(bounds=torch.tensor(rows), by_query=is_causal)


def _documents_fields(mask: Mask, shape: tuple[int, int, int, int]) -> dict:
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
    if len(queries) == 1:
        return _numbered(queries[0], keys[0])
    # With several document masks, ids must agree in all of them: each distinct tuple of ids becomes
    # one new id, shared by queries and keys.
    stacked = [
        torch.cat([q.expand(batch, -1), k.expand(batch, -1)], dim=1).to(torch.int64)
        for q, k in zip(queries, keys, strict=True)
    ]
    tuples = torch.stack(stacked, dim=-1).reshape(-1, len(stacked))
    numbers = torch.unique(tuples, dim=0, return_inverse=True)[1].reshape(batch, -1)
    return {"query_documents": numbers[:, :seqlen_q], "key_documents": numbers[:, seqlen_q:]}


def _numbered(query_ids: Tensor, key_ids: Tensor) -> dict:
    """Return the document fields with ids that fit into 32 bits, in which kernels compare them.

    Ids that are not known to fit become their first index in the sorted ids. That needs no host
    read of GPU values.
    """
    ids = [query_ids, key_ids]
    if not all(_fits(t) for t in ids):
        ids = [t.to(torch.int64) for t in ids]
        every = torch.cat([t.flatten() for t in ids]).sort().values
        ids = [torch.searchsorted(every, t.contiguous()) for t in ids]
    query_ids, key_ids = (t.to(torch.int64).contiguous() for t in ids)
    return {"query_documents": query_ids, "key_documents": key_ids}


def _fits(ids: Tensor) -> bool:
    """Return True if ids are known to fit into 32 bits."""
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
        slopes = slopes.detach().to(device=device, dtype=torch.float32)
        total = slopes if total is None else total + slopes
    return total


def _as_4d(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a 4-D view in which all broadcast dimensions have size 1.

    This includes expanded (stride-0) dimensions, unless the tensor requires grad.
    """
    if tensor.dim() > 4:
        raise ValueError(f"{name} must have at most 4 dimensions, got {tuple(tensor.shape)}")
    view = tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]
    for dim, (have, want) in enumerate(zip(view.shape, shape, strict=True)):
        if have not in (1, want):
            # In self-attention a transposed layout passes all earlier checks: it fails only here.
            swapped = shape[2] == shape[3] != shape[1] > 1
            fits = swapped and set(view.shape[2:]) in ({shape[1]}, {1, shape[1]})
            hint = TRANSPOSED if fits else ""
            raise ValueError(
                f"{name} must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k) = "
                f"{shape}, got {tuple(tensor.shape)}{hint}"
            )
        if have > 1 and view.stride(dim) == 0:
            # The gradient of an expanded tensor has the expanded shape, so materialize the tensor.
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
    """Return the spec with tile summaries of its dense tensors, computed once per spec.

    Args:
        summarize: the backend's kernel; returns None if the backend does not use summaries.
    """
    if not plain_eager(spec.dense, spec.bias):
        return spec
    for name in ("dense", "bias"):
        tensor, summary = getattr(spec, name), getattr(spec, f"{name}_summary")
        if tensor is not None and summary is None:
            # The only mutation of a spec: it caches the summary beside its source. A second thread
            # must not replace the summary, as kernels of the first may be reading it.
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
    # min and max would compare symbolic values and add a guard on the result.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def _maximum(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def reduced(tensors: list[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Combine all tensors; return None for an empty list."""
    total = None
    for tensor in tensors:
        total = tensor if total is None else combine(total, tensor)
    return total
