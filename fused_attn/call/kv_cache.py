"""KV caches: validation, masks, appending, and conversion of pages to contiguous tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.base.flat import Empty
from fused_attn.base.layout import contiguous
from fused_attn.base.torch_state import host_readable, plain_eager
from fused_attn.call.validation import (
    check_floats,
    check_heads,
    check_integers,
    check_length,
    check_like_query,
    check_same,
)
from fused_attn.masks import UNLIMITED, Mask
from fused_attn.masks.mask import diagonals
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import BOUNDS, NO_MASK, MaskSpec, spec_of_mask

CAUSAL = masks.causal("bottom_right")
NO_GRAD = (
    "{name} must not require grad: caches are overwritten, so no gradient can flow through them; "
    "call decode_attention under torch.no_grad()"
)


class CacheUpdate(NamedTuple):
    """A KV cache, and the new keys and values that `decode_attention` appends to it.

    Attributes:
        caches: key_cache and value_cache, (batch, num_heads_kv, max_len, dim), or (num_pages,
            num_heads_kv, page_size, dim) with a block table.
        key, value: (batch, num_heads_kv, seqlen_new, dim), or None to append nothing.
        seqlen_new: number of new rows of each sequence; 0 if nothing is appended.
        lengths: (batch,) integers; number of rows of each sequence that are already in the cache.
            A tensor, or a list or tuple of ints.
        block_table: (batch, max_pages) integers; the pages of each sequence. None if the cache is
            not paged.
        capacity: largest number of rows of a sequence.
        ends: smallest and largest number of rows of a sequence after the update; None if the host
            cannot read the lengths.
        plain: True if nothing intercepts the call and no tensor is of a subclass.
    """

    caches: tuple[Tensor, Tensor]
    key: Tensor | None
    value: Tensor | None
    seqlen_new: int
    lengths: Any  # Tensor | Sequence[int]
    block_table: Tensor | None
    capacity: int
    ends: tuple[int, int] | None
    plain: bool


# ---- validation ---------------------------------------------------------------------------------


def checked_update(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    lengths: Tensor | Sequence[int],
    block_table: Tensor | None,
) -> CacheUpdate:
    """Validate the arguments of `decode_attention` that describe the cache."""
    check_decode_tensors(query, key_cache, value_cache, key, value)
    capacity = key_cache.shape[2]
    if block_table is None:
        check_same("key_cache", "batch", key_cache.shape[0], query.shape[0], "query")
    else:
        check_integers("block_table", block_table, query)
        batch = query.shape[0]
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(
                f"block_table must have shape ({batch}, max_pages), got {tuple(block_table.shape)}"
            )
        capacity *= block_table.shape[1]
    check_length(query.shape[2], capacity)
    plain = plain_eager(query, key_cache, value_cache, key, value, block_table)
    seqlen_new = 0 if key is None else key.shape[2]
    lengths, ends = checked_cache_lengths(lengths, query, seqlen_new, capacity)
    caches = key_cache, value_cache
    return CacheUpdate(caches, key, value, seqlen_new, lengths, block_table, capacity, ends, plain)


def check_decode_tensors(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
) -> None:
    """Raise ValueError or TypeError unless the tensors of a decoding step are compatible.

    The batch of the cache is not checked.
    """
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    if (key is None) != (value is None):
        got = "value" if key is None else "key"
        raise ValueError(f"key and value must be given together, got only {got}")
    if key is not None and value is not None:
        tensors.update(key=key, value=value)
    check_floats(tensors, 4)
    check_like_query(tensors)
    grad_enabled = torch.is_grad_enabled()
    for name, tensor in tensors.items():
        if grad_enabled and tensor.requires_grad:
            raise ValueError(NO_GRAD.format(name=name))
    check_same("key_cache", "head_dim", key_cache.shape[3], query.shape[3], "query")
    check_same(
        "value_cache", "shape", tuple(value_cache.shape[:3]), tuple(key_cache.shape[:3]),
        "key_cache, except in the last dimension",
    )  # fmt: skip
    check_heads("key_cache", query, key_cache)
    if key is not None and value is not None:
        new_rows = query.shape[0], key_cache.shape[1], key.shape[2]
        for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
            expected = (*new_rows, cache.shape[3])
            if new.shape != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(new.shape)}")
            strides = cache.stride()
            if 0 in strides and any(
                n > 1 and s == 0 for n, s in zip(cache.shape, strides, strict=True)
            ):
                raise ValueError(
                    f"{name}_cache must not be an expanded tensor, because new rows are written "
                    "into it: pass a contiguous copy"
                )


def checked_cache_lengths(
    lengths: Tensor | Sequence[int], query: Tensor, seqlen_new: int, capacity: int
) -> tuple[Tensor | Sequence[int], tuple[int, int] | None]:
    """Validate cache_lengths and convert them to a tensor, unless they are a list or tuple of ints.

    Returns:
        The lengths, and `CacheUpdate.ends`.
    """
    batch, values = query.shape[0], None
    if type(lengths) in (list, tuple) and lengths and all(type(n) is int for n in lengths):
        values = lengths
        shape: tuple[int, ...] = (len(lengths),)
    else:
        if not isinstance(lengths, Tensor):
            try:
                lengths = torch.as_tensor(lengths)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"cache_lengths must be a tensor or a sequence of ints, got {lengths}"
                ) from error
            lengths = lengths.long() if lengths.numel() == 0 else lengths
        check_integers("cache_lengths", lengths)
        shape = tuple(lengths.shape)
        if len(shape) == 1 and host_readable(lengths):
            values = lengths.tolist()
    if shape != (batch,):
        raise ValueError(f"cache_lengths must have shape ({batch},), got {shape}")
    if not values:
        return lengths, None
    least, most = min(values), max(values)
    if least < 0 or most + seqlen_new > capacity:
        raise ValueError(
            f"cache_lengths must be in [0, {capacity - seqlen_new}] (capacity of the cache minus "
            f"{seqlen_new} new positions), got [{least}, {most}]"
        )
    return lengths, (least + seqlen_new, most + seqlen_new)


def check_pages(update: CacheUpdate) -> None:
    """Raise ValueError if the block table has an invalid page before the end of a sequence.

    Only values that the host can read are checked.
    """
    table = update.block_table
    if table is None or update.ends is None or not host_readable(table):
        return
    num_pages, _, page_size, _ = update.caches[0].shape
    ends = torch.as_tensor(update.lengths, device=table.device) + update.seqlen_new
    table = table[:, : -(-update.ends[1] // max(page_size, 1))]
    needed = torch.arange(table.shape[1], device=table.device) * page_size < ends[:, None]
    wrong = needed & ((table < 0) | (table >= num_pages))
    if wrong.any():
        raise ValueError(
            f"block_table must contain page indices in [0, {num_pages}) up to the end of each "
            f"sequence, got {int(table[wrong][0])}"
        )


# ---- masks --------------------------------------------------------------------------------------


def with_cache_lengths(
    mask: Mask | None, is_causal: bool, lengths: Tensor, seqlen_new: int, seqlen_q: int
) -> Mask:
    """Return the mask restricted to cached and new positions.

    The result is cached on the mask, or on lengths without a mask, so all layers share it.
    """

    def make() -> Mask:
        # The sum is a new tensor, because the cached mask must not reference `lengths`.
        ends = lengths + seqlen_new
        whole = masks.padding(ends)
        if padded:
            whole &= diagonals(UNLIMITED, 0, ends.long() - seqlen_q)
        elif is_causal:
            whole &= CAUSAL
        return whole if mask is None else mask & whole

    # Padding in the mask would move the diagonal of CAUSAL to the padded ends.
    padded = is_causal and mask is not None and bool(mask.paddings)
    key = ("decode", is_causal, seqlen_new, seqlen_q if padded else None)
    if mask is None:
        return recall_on_tensor(lengths, key, [lengths], make)
    return recall(mask.memo, key, [lengths], lengths.device, make)


def spec_of_ends(update: CacheUpdate, query: Tensor, is_causal: bool) -> MaskSpec:
    """Return the MaskSpec of a step without attn_mask, for keys up to the longest sequence.

    Sequences of equal length need no padding mask. Different lengths are supported only on a CPU,
    where this function is faster than `spec_of_mask`.

    Args:
        update: `ends` must be known.
        is_causal: apply a bottom-right causal mask.
    """
    assert update.ends is not None
    shortest, longest = update.ends
    batch, num_heads, seqlen_q, _ = query.shape
    if shortest == longest:
        if not is_causal:
            return NO_MASK
        return spec_of_mask(CAUSAL, batch, num_heads, seqlen_q, longest, query.device)
    lengths = update.lengths
    columns = {"query_end": seqlen_q, "band_lo": -UNLIMITED, "band_hi": UNLIMITED}
    rows = []
    for length in lengths.tolist() if isinstance(lengths, Tensor) else lengths:
        columns["key_end"] = end = length + update.seqlen_new
        if is_causal:
            columns["band_hi"] = end - seqlen_q
        rows.append([columns.get(name, 0) for name in BOUNDS])
    return MaskSpec(bounds=torch.tensor(rows), by_query=is_causal)


# ---- rows of a cache ----------------------------------------------------------------------------


def append(update: CacheUpdate) -> None:
    """Write the new keys and values to the cache, in place."""
    if update.key is None or update.value is None:
        return
    rows = [_apart(new, update) for new in (update.key, update.value)]
    pairs = list(zip(update.caches, rows, strict=True))
    seqlen_new, table, ends = update.seqlen_new, update.block_table, update.ends
    if table is None and ends is not None and ends[0] == ends[1]:
        for cache, new in pairs:
            cache.narrow(2, ends[0] - seqlen_new, seqlen_new).copy_(new)
        return
    batch, device = update.key.shape[0], update.key.device
    lengths = torch.as_tensor(update.lengths, device=device).to(torch.int64)
    row = lengths[:, None] + torch.arange(seqlen_new, device=device)
    if table is None:
        holder = torch.arange(batch, device=device)[:, None]
    else:
        page_size = update.caches[0].shape[2]
        holder = table.to(torch.int64).gather(1, row // page_size)
        row = row % page_size
    for cache, new in pairs:
        cache[holder, :, row] = new.transpose(1, 2)


def _apart(new: Tensor, update: CacheUpdate) -> Tensor:
    """Return new keys or values, copied if they are known to share memory with a cache."""
    if not (update.plain or host_readable(new)):
        return new
    memory = new.untyped_storage().data_ptr()
    shared = any(cache.untyped_storage().data_ptr() == memory for cache in update.caches)
    return new.clone() if shared else new


def contiguous_rows(update: CacheUpdate, empty: Empty) -> list[Tensor]:
    """Return the keys and values of all sequences, (batch, num_heads_kv, update.capacity, dim).

    A contiguous cache is not copied. Pages are copied up to the longest sequence if the host knows
    its length, otherwise up to the capacity. Rows after the end of a sequence are arbitrary.
    """
    if update.block_table is None:
        return [cache.narrow(2, 0, update.capacity) for cache in update.caches]
    return [_gather_pages(cache, update, empty) for cache in update.caches]


def _gather_pages(cache: Tensor, update: CacheUpdate, empty: Empty) -> Tensor:
    """Copy the pages of each sequence, up to the longest one, to a tensor of update.capacity rows.

    On a CPU, `_select_pages` makes the copy if the longest sequence extends to the last page.
    """
    assert update.block_table is not None
    count = update.capacity
    longest = count if update.ends is None else update.ends[1]
    num_pages, num_heads, page_size, dim = cache.shape
    batch = update.block_table.shape[0]
    pages, used = (-(-rows // max(page_size, 1)) for rows in (count, longest))
    if 0 in (batch, num_heads, pages, dim, num_pages):
        return cache.new_empty(batch, num_heads, count, dim)
    # Entries beyond the end of a sequence may be invalid page indices.
    table = update.block_table[:, :used].to(torch.int64).clamp(0, num_pages - 1)
    if used == pages and update.plain and cache.device.type == "cpu":
        return _select_pages(cache, table, empty).narrow(2, 0, count)
    copies = cache.new_empty(batch, num_heads, pages, page_size, dim)
    copies[:, :, :used] = cache[table].transpose(1, 2)
    return copies.flatten(2, 3).narrow(2, 0, count)


def _select_pages(cache: Tensor, table: Tensor, empty: Empty) -> Tensor:
    """Copy the pages of each sequence in one pass, in the memory layout of the cache.

    This takes 6 ms for (8, 8, 2048, 64) in float32 if `empty` reuses memory, and indexing takes
    40 ms.
    """
    num_heads, page_size, dim = cache.shape[1:]
    batch, used = table.shape
    if cache.is_contiguous():
        heads = torch.arange(num_heads)[:, None]
        pages, index = cache.flatten(0, 1), (table[:, None] * num_heads + heads).flatten()
        shape: tuple[int, ...] = (batch, num_heads, used, page_size, dim)
    else:  # usually (num_pages, page_size, num_heads, dim), as in flash-attn
        pages, index = cache.transpose(1, 2), table.flatten()
        shape = (batch, used, page_size, num_heads, dim)
    copies = empty(*contiguous(shape), cache.dtype, cache.device)
    torch.index_select(pages, 0, index, out=copies.view(len(index), *pages.shape[1:]))
    return copies.flatten(2, 3) if cache.is_contiguous() else copies.flatten(1, 2).transpose(1, 2)
