"""Packed sequences: their MaskSpec, validation, and conversion to and from a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.base.torch_state import host_readable, savable
from fused_attn.call.attention import AttentionCall
from fused_attn.call.validation import check_integers, check_length, check_same
from fused_attn.masks import Mask
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import MaskSpec, spec_of_mask


def cumulative(lengths: Tensor) -> Tensor:
    """Return the cu_seqlens of sequences: their cumulative lengths from 0, int32 (batch + 1,)."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def packed_spec(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Mask | None,
    is_causal: bool,
) -> MaskSpec:
    """Validate cu_seqlens and maximum lengths, and return the MaskSpec of the packed call.

    The result is cached on the mask, or on cu_seqlens_q without a mask, so all layers share it.
    """
    _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    num_heads = query.shape[1]

    def make() -> MaskSpec:
        starts_q = _checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, query)
        starts_k = _checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, key)
        check_same("cu_seqlens_k", "shape", starts_k.shape, starts_q.shape, "cu_seqlens_q")
        within = masks.padding(cu_seqlens_k.diff(), cu_seqlens_q.diff())
        within = within & masks.causal() if is_causal else within
        within = within if mask is None else mask & within
        batch = starts_q.shape[0] - 1
        spec = spec_of_mask(within, batch, num_heads, max_seqlen_q, max_seqlen_k, query.device)
        band = spec.band
        if band is not None:  # only `bounds` can express padding within the sequences
            same = 0 if cu_seqlens_q is cu_seqlens_k else None
            band = band._replace(offset=same) if band.lengths == 1 else None
        # A cached value must not hold a reference to the tensor that owns the cache.
        return replace(
            spec,
            band=band,
            cu_seqlens_q=starts_q.clone() if starts_q is cu_seqlens_q else starts_q,
            cu_seqlens_k=starts_k.clone() if starts_k is cu_seqlens_q else starts_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    memo_key = ("spec", is_causal, max_seqlen_q, max_seqlen_k, num_heads, len(query), len(key))
    ends = cu_seqlens_q, cu_seqlens_k
    if mask is None:
        return recall_on_tensor(cu_seqlens_q, memo_key, ends, make)
    return recall(mask.memo, memo_key, (*ends, *mask.tensors()), query.device, make)


def _check_max_seqlen(name: str, seqlen: int) -> None:
    if isinstance(seqlen, bool) or not isinstance(seqlen, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(seqlen).__name__}")
    if seqlen < 0:
        raise ValueError(f"{name} must be >= 0, got {seqlen}")
    check_length(seqlen)


def _checked_cu_seqlens(name: str, cu_seqlens: Tensor, max_seqlen: int, rows: Tensor) -> Tensor:
    check_integers(name, cu_seqlens, rows)

    def converted() -> Tensor | None:
        check_cu_seqlens(name, cu_seqlens, max_seqlen, rows.shape[0])
        starts = cu_seqlens.resolve_neg().to(torch.int64).contiguous()
        # A cached value must not reference the tensor that owns the cache.
        return None if starts is cu_seqlens else starts

    memo_key = ("cu_seqlens", max_seqlen, rows.shape[0])
    starts = recall_on_tensor(cu_seqlens, memo_key, (cu_seqlens,), converted)
    starts = cu_seqlens if starts is None else starts
    return starts if savable(starts) else starts.clone()


def check_cu_seqlens(name: str, cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
    """Raise ValueError unless cu_seqlens divides rows [0, total) into sequences of valid length.

    Values are checked only if the host can read them, not on a GPU or in a graph.

    Args:
        name: name of the argument, for error messages.
        cu_seqlens: (batch + 1,) integers, cumulative lengths from 0 to total.
        max_seqlen: maximum length of a sequence.
        total: number of packed rows.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    if not host_readable(cu_seqlens):
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    hint = "; pass cumulative lengths: (0, n0, n0 + n1, ...)"
    if (first, last) != (0, total):
        raise ValueError(
            f"{name} must begin with 0 and end with the number of rows, {total}, got {first} and "
            f"{last}{hint}"
        )
    lengths = cu_seqlens.diff()
    if lengths.numel() == 0:
        return
    shortest, longest = (int(x) for x in torch.aminmax(lengths))
    if shortest < 0 or longest > max_seqlen:
        raise ValueError(
            f"{name} must have differences (lengths) in [0, {max_seqlen}], "
            f"got [{shortest}, {longest}]{hint}"
        )


def over_padded(
    call: AttentionCall, run: Callable[[AttentionCall], tuple[Tensor, Any]]
) -> tuple[Tensor, Any]:
    """Run a packed call as a padded batch, and return its out and lse in packed form.

    Args:
        call: a call with packed sequences.
        run: computes out and lse of a padded call.

    Returns:
        out, (1, num_heads, total_q, head_dim_v), and lse, (1, num_heads, total_q) or None.
    """
    spec = call.mask
    assert spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None
    padded = replace(
        call,
        query=pad(call.query, spec.cu_seqlens_q, spec.max_seqlen_q),
        key=pad(call.key, spec.cu_seqlens_k, spec.max_seqlen_k),
        value=pad(call.value, spec.cu_seqlens_k, spec.max_seqlen_k),
        mask=replace(spec, cu_seqlens_q=None, cu_seqlens_k=None),
    )
    total_q = call.query.shape[2]
    out, lse = run(padded)
    out = unpad(out, spec.cu_seqlens_q, total_q)
    return out, None if lse is None else unpad(lse, spec.cu_seqlens_q, total_q)


def pad(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Convert packed (1, heads, total, dim) to padded (batch, heads, max_seqlen, dim).

    Padding rows are copies of other packed rows, or zeros.
    """
    _, num_heads, total, dim = packed.shape

    def make() -> Tensor:
        index = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=packed.device)
        return index.clamp(max=total)

    index = recall_on_tensor(cu_seqlens, ("pad", max_seqlen, total), (cu_seqlens,), make)
    rows = torch.cat([packed[0], packed.new_zeros(num_heads, 1, dim)], dim=1)
    return rows[:, index].transpose(0, 1)


def unpad(padded: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Convert padded (batch, heads, max_seqlen, ...) to packed (1, heads, total, ...)."""
    batch, num_heads, max_seqlen = padded.shape[:3]

    def make() -> Tensor:
        row = torch.arange(total, device=padded.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
        return sequence * max_seqlen + row - cu_seqlens[sequence]

    index = recall_on_tensor(cu_seqlens, ("unpad", max_seqlen, total), (cu_seqlens,), make)
    rows = padded.transpose(0, 1).reshape(num_heads, batch * max_seqlen, *padded.shape[3:])
    return rows[:, index][None]
