"""Masks as arguments of flash-attention kernels: a window, and the lengths of sequences.

These kernels align windows and ALiBi with the last query and the last key of each sequence, and
support no other masks. Padding is expressed by additional sequences: the rows stay in place, and
each padding region is a sequence that has only queries or only keys. Rows are then neither gathered
nor scattered, and the number of real rows is not read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_attn.call.packed import cumulative
from fused_attn.masks.band import Band
from fused_attn.masks.mask import UNLIMITED
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import BOUNDS, MaskSpec

_CACHED = 8  # shapes cached for a mask; the values are small


class MaskPlan(NamedTuple):
    """Arguments of the kernels for a mask, as far as the host knows them.

    Attributes:
        left, right: window around the diagonal that ends at the last query and key of each
            sequence; None for no limit.
        key_begin, key_end: range of the keys to pass, for a batch without lengths. All other keys
            are fully masked.
        empty: no key is visible.
        square: a top-left causal mask over sequences whose numbers of queries and keys may differ.
            It takes two calls. In the first, queries with a key at their position attend causally;
            in the second, the remaining queries attend to all keys.
    """

    left: int | None
    right: int | None
    key_begin: int = 0
    key_end: int = 0
    empty: bool = False
    square: bool = False


def plan_of(band: Band, packed: bool, seqlen_q: int, seqlen_k: int) -> MaskPlan | str:
    """Return the MaskPlan of a mask, or the reason why the kernels cannot express it."""
    if packed or band.left or band.right:
        return _with_lengths(band, seqlen_q, seqlen_k)
    key_begin = max(0, band.lo)
    key_end = min(seqlen_k, max(0, seqlen_q + band.hi))
    if key_end <= key_begin:
        return MaskPlan(None, None, empty=True)
    offset = key_end - seqlen_q
    if band.lo > offset:
        return "does not support a band that masks all keys for the last queries"
    if band.alibi and band.alibi_offset != offset:
        return _ALIBI
    window = _window(offset - band.lo, band.hi - offset, seqlen_q, seqlen_k)
    return MaskPlan(*window, key_begin, key_end)


_ALIBI = "supports ALiBi only if it is aligned at the bottom right"
_ALIGNED = "supports top-left alignment in a batch of different lengths only for causal masks"


def _with_lengths(band: Band, seqlen_q: int, seqlen_k: int) -> MaskPlan | str:
    lo, hi, from_end = band.lo, band.hi, band.from_end or not band.is_limited
    if band.alibi and not band.alibi_from_end and band.offset != 0:
        return _ALIBI
    if not from_end and band.offset is None:
        if band.left or band.alibi or lo > -UNLIMITED or hi != 0:
            return _ALIGNED
        return MaskPlan(None, 0, square=True)
    if not from_end and band.offset is not None:
        lo = lo - band.offset if lo > -UNLIMITED else lo
        hi = hi - band.offset if hi < UNLIMITED else hi
    if lo > 0 or hi < 0:
        return "does not support a band that masks the last key for the last query"
    return MaskPlan(*_window(-lo, hi, seqlen_q, seqlen_k))


def _window(left: int, right: int, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """Return a window with None for limits that mask nothing, because window kernels are slower."""
    return (None if left >= seqlen_k else left), (None if right >= seqlen_q else right)


# ---- sequences ----------------------------------------------------------------------------------


class Sequences(NamedTuple):
    """Cumulative sequence lengths of a varlen call.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,).
        copies: number of consecutive sequences for each sequence of the batch.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    copies: int


class Layout(NamedTuple):
    """Sequences of the calls for a mask, and the keys that are not padding.

    Attributes:
        calls: one, or two for `MaskPlan.square`. Each of them covers all rows.
        real_keys: bool (batch, seqlen_k), False for padding and in sequences that have no queries;
            None without padding.
    """

    calls: tuple[Sequences, ...]
    real_keys: Tensor | None


def layout_of(spec: MaskSpec, plan: MaskPlan, sizes: tuple[int, int, int], query: Tensor) -> Layout:
    """Return the sequences for a mask, cached on it.

    Args:
        sizes: (batch, seqlen_q, seqlen_k), see `MaskSpec.sizes`.
        query: only its device is used.
    """
    device = query.device
    tensors = [t for t in (spec.bounds, spec.cu_seqlens_q, spec.cu_seqlens_k) if t is not None]

    def make() -> Layout:
        if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
            starts_q, starts_k = spec.cu_seqlens_q, spec.cu_seqlens_k
            if plan.square:
                return Layout(_square([starts_q.diff(), starts_k.diff()]), None)
            own = Sequences(starts_q.to(torch.int32), starts_k.to(torch.int32), 1)
            return Layout((own,), None)
        batch, seqlen_q, seqlen_k = sizes
        if spec.bounds is None:
            row = torch.arange(batch + 1, dtype=torch.int32, device=device)
            return Layout((Sequences(row * seqlen_q, row * seqlen_k, 1),), None)
        return _of_bounds(spec, plan, seqlen_q, seqlen_k)

    memo_key = ("flash", sizes, plan.square, device)
    if tensors:
        return recall_on_tensor(tensors[0], memo_key, tensors, make, _CACHED)
    return recall(spec.own_memo(), memo_key, tensors, device, make)


def _of_bounds(spec: MaskSpec, plan: MaskPlan, seqlen_q: int, seqlen_k: int) -> Layout:
    """Return the sequences of a batch with padding."""
    bounds, band = spec.bounds, spec.band
    assert bounds is not None and band is not None
    column = dict(zip(BOUNDS, bounds.unbind(1), strict=True))
    begins = column["query_begin"], column["key_begin"]
    ends = column["query_end"], column["key_end"]
    counts = [(end - begin).clamp(min=0) for begin, end in zip(begins, ends, strict=True)]
    before = _apart(*begins) if band.left else []
    rest = [
        n - begin - count
        for n, begin, count in zip((seqlen_q, seqlen_k), begins, counts, strict=True)
    ]
    after = _apart(*rest)
    if not band.queries:
        before, after = before[1:], after[1:]
    if plan.square:
        calls = _square(counts, after)
    else:
        calls = (_sequences([*before, (counts[0], counts[1]), *after]),)
    position = torch.arange(seqlen_k, device=bounds.device)
    end = torch.where(counts[0] > 0, begins[1] + counts[1], 0)  # 0 without queries
    return Layout(calls, (position >= begins[1][:, None]) & (position < end[:, None]))


Pair = tuple[Tensor, Tensor]  # numbers of queries and keys, each (batch,)


def _square(counts: list[Tensor], after: Sequence[Pair] = ()) -> tuple[Sequences, ...]:
    """Return the sequences of both calls for a top-left causal mask, see `MaskPlan.square`."""
    queries, keys = counts
    common = torch.minimum(queries, keys)
    rest, behind, none = queries - common, keys - common, torch.zeros_like(common)
    causal = [(common, common), (rest, none), (none, behind)]
    full = [(common, none), (rest, common), (none, behind)]
    return _sequences([*causal, *after]), _sequences([*full, *after])


def _apart(queries: Tensor, keys: Tensor) -> list[Pair]:
    """Return a sequence of queries without keys, and one of keys without queries."""
    none = torch.zeros_like(queries)
    return [(queries, none), (none, keys)]


def _sequences(pairs: list[Pair]) -> Sequences:
    """Return the cumulative lengths of sequences; a pair is one sequence of each batch entry."""
    queries, keys = (
        cumulative(torch.stack([pair[side] for pair in pairs], dim=1).flatten())
        for side in range(2)
    )
    return Sequences(queries, keys, len(pairs))
