"""Masks from functions of positions, as in FlexAttention, and unions of masks.

A function is evaluated for the shape of a call, a block of rows at a time. If the visible keys of
each query are consecutive, the mask becomes bands, key masks, prefixes and documents if these
express it, or on a CPU a table of intervals. Kernels then skip tiles, and no tensor of
seqlen_q x seqlen_k elements is allocated. All other masks become a table of bits on a CPU, and
dense tensors on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fused_attn.base.torch_state import batched, is_compiling, is_intercepted
from fused_attn.masks.fields import Shape
from fused_attn.masks.mask import UNLIMITED, Mask, diagonals, documents, prefix_lm
from fused_attn.masks.memo import note_reads
from fused_attn.masks.tables import as_bits, shown_by_intervals

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Maximum number of positions per evaluation: 4 MiB of bool, 8 times that for intermediate results.
CHUNK = 1 << 22


def from_mask_mod(mask_mod: MaskMod) -> Mask:
    """Create a mask from a function of positions, such as a mask_mod of FlexAttention.

    The function is evaluated once for each shape: at the first call with this shape, or earlier by
    `mask.plot`. Causal masks, windows, prefixes and documents are recognized, and are as fast as
    those of the other functions of this module; lengths become a bool tensor of the keys. The cost
    of other masks depends on the device. On a CPU, a mask becomes a table of key intervals if the
    visible keys of each query are consecutive, as in windows that differ between heads, otherwise a
    table of bits. On other devices, it becomes a bool tensor of shape (batch or 1, num_heads or 1,
    seqlen_q, seqlen_k).

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) returns True if query q_idx of sequence b and head h
            attends to key kv_idx. The arguments are int scalar tensors under torch.vmap. Tensors
            that the function reads must be on the device of query, and may change in place; see
            `Mask`. Other values that it reads, including variables, must not change.

    Raises:
        TypeError: mask_mod is not callable.

    Example:
        >>> mask = fused_attn.masks.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 128)
        >>> query, key, value = (torch.randn(1, 4, 256, 64) for _ in range(3))
        >>> out = fused_attn.scaled_dot_product_attention(
        ...     query, key, value, mask & fused_attn.masks.causal()
        ... )

    Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized
        Attention Kernels".
    """
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")
    # A tuple in mask_mods is a union, but a NamedTuple may be a function.
    return Mask(mask_mods=(mask_mod.__call__ if isinstance(mask_mod, tuple) else mask_mod,))


def from_block_mask(block_mask: Any) -> Mask:
    """Return the Mask of a BlockMask of FlexAttention: its listed blocks, and its mask_mod."""
    # The function must not reference the BlockMask, which is a weak key of the cache in tensors.py.
    block_q, block_k = block_mask.BLOCK_SIZE
    own = block_mask.mask_mod
    columns = -(-block_mask.seq_lengths[1] // block_k)
    partial = block_mask.kv_num_blocks, block_mask.kv_indices
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    by_batch, by_head = (size > 1 for size in partial[0].shape[:2])

    def lookup(blocks: Any, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        counts, indices = blocks
        table = _listed(counts, indices, columns)  # evaluated here, because its tensors may change
        table = table if by_head else table[:, 0]
        table = table if by_batch else table[0]
        index = [i for i, used in ((b, by_batch), (h, by_head)) if used]
        index += [q // block_q, k // block_k]
        return table[tuple(index)]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = lookup(partial, b, h, q, k) & own(b, h, q, k)
        return visible if full[0] is None else visible | lookup(full, b, h, q, k)

    mask_mod.seq_lengths = tuple(block_mask.seq_lengths)  # type: ignore[attr-defined]
    return from_mask_mod(mask_mod)


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return a mask of the listed blocks, bool (batch, num_heads, rows, columns)."""
    places = torch.arange(indices.shape[-1], device=indices.device)
    index = torch.where(places < counts[..., None], indices, columns).long()
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, index, True)[..., :columns]


def resolved(mask: Mask, shape: Shape, device: torch.device) -> Mask:
    """Return the mask with its functions and unions replaced by conditions for this shape.

    Args:
        shape: (batch, num_heads, seqlen_q, seqlen_k).
        device: device of query.
    """
    if not mask.mask_mods:
        return mask
    result = Mask(*(c for c in mask.conditions() if c is not mask.mask_mods))
    for mask_mod in mask.mask_mods:
        if isinstance(mask_mod, tuple):  # a union; its bands align with the ends of the sequences
            mask_mod = tuple([Mask(paddings=mask.paddings) & member for member in mask_mod])
        result &= _resolved(mask_mod, shape, device)
    return result


def _resolved(mask_mod: Any, shape: Shape, device: torch.device) -> Mask:
    lengths = getattr(mask_mod, "seq_lengths", shape[2:])
    if tuple(lengths) != tuple(shape[2:]):
        raise ValueError(f"attn_mask must be a BlockMask for lengths {shape[2:]}, got {lengths}")
    if 0 in shape:
        return Mask()
    if is_intercepted() or device.type == "meta":  # recognition reads values
        rows = slice(0, shape[2])  # a range would specialize a symbolic length
        return Mask(dense_masks=(_visible(mask_mod, shape, rows, device),))
    used = shape if isinstance(mask_mod, tuple) else used_shape(mask_mod, shape, device)
    return recognized(lambda rows: _visible(mask_mod, used, rows, device), used, shape, device)


def recognized(
    visible: Callable[[range], Tensor], used: Shape, shape: Shape, device: torch.device
) -> Mask:
    """Convert visible keys to a Mask, with a dense tensor only if necessary.

    Args:
        visible: returns the visible keys of some rows, bool (batch or 1, num_heads or 1, rows,
            seqlen_k).
        used: shape of the visible keys of all rows.
        shape: (batch, num_heads, seqlen_q, seqlen_k).
        device: device of the visible keys.
    """
    tables: list[Tensor] = []
    dense: list[Tensor] = []  # or bits, if visible keys are not consecutive
    on_cpu = device.type == "cpu"
    for rows in row_blocks(used):
        seen = visible(rows)
        table = None if dense else _intervals(seen)
        if table is not None:
            tables.append(table)
            continue
        before = [shown_by_intervals(t, shape[3]) for t in tables]
        dense += [as_bits(part) if on_cpu else part for part in (*before, seen)]
        tables = []
    if dense:
        whole = torch.cat(dense, dim=2)
        return Mask(bits=(whole,)) if on_cpu else Mask(dense_masks=(whole,))
    table = torch.cat(tables, dim=2)
    structure = None
    if bool((table == table[:, :1]).all()):
        structure = _structure(table[:, 0, :, 0], table[:, 0, :, 1], shape)
    if structure is not None:
        return structure
    if on_cpu:
        return Mask(intervals=(table,))
    return Mask(dense_masks=(shown_by_intervals(table, shape[3]),))


# ---- evaluation ---------------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Mode that records tensors whose values torch functions read, except their results.

    Under vmap, batched tensors are not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}  # results; references to them keep their ids unique

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made, name = self.of(result), function.__name__
        if not name.startswith("new_") and (made or name not in _METADATA):
            self.read |= {id(tensor): tensor for tensor in self.of((args, kwargs))}
        self.made |= {id(t): t for t in made if id(t) not in self.read}  # in-place functions
        return result

    def of(self, values: Any) -> list[Tensor]:
        """Return the tensors in `values` that may be recorded."""
        return [
            value
            for value in tree_leaves(values)
            if isinstance(value, Tensor) and id(value) not in self.made and not batched(value)
        ]


# Names of methods and attributes that read no values, unless they return a tensor.
_METADATA = {"__get__", "__len__", "dim", "numel", "size", "stride"}


def used_shape(function: MaskMod, shape: Shape, device: torch.device) -> Shape:
    """Return the shape, with size 1 for batch and heads if the function does not use them."""
    b, h, q, k = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))
    with Reads() as reads:
        result = function(b, h, q, k)
    used = {*reads.read, *map(id, reads.of(result))}
    batch, heads = (n if id(i) in used else 1 for n, i in zip(shape[:2], (b, h), strict=True))
    return (batch, heads, *shape[2:])


def row_blocks(shape: Shape) -> Iterator[range]:
    """Yield ranges of at least one row, with at most CHUNK positions each if possible."""
    batch, heads, seqlen_q, seqlen_k = shape
    size = max(1, CHUNK // (batch * heads * seqlen_k))
    for start in range(0, seqlen_q, size):
        yield range(start, min(start + size, seqlen_q))


def _visible(mask_mod: Any, shape: Shape, rows: range | slice, device: torch.device) -> Tensor:
    """Return the visible positions of some rows: bool (batch, num_heads, rows, seqlen_k).

    For a union, batch and num_heads may be 1.
    """
    batch, heads, _, seqlen_k = shape
    start, count = rows.start, rows.stop - rows.start
    if isinstance(mask_mod, tuple):
        one, other = (mask._visible_rows(shape, rows, device) for mask in mask_mod)
        return (one | other).expand(-1, -1, count, seqlen_k)
    from torch.nn.attention.flex_attention import create_mask

    def shifted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + start
        if is_compiling():
            return mask_mod(b, h, q, k)
        with Reads() as reads:
            visible = mask_mod(b, h, q, k)
        note_reads([*reads.read.values(), *reads.of(visible)])
        return visible

    visible = create_mask(shifted, batch, heads, count, seqlen_k, device)
    if visible.dtype != torch.bool:
        raise TypeError(f"mask_mod must return bool, got {visible.dtype}")
    return visible


# ---- recognition --------------------------------------------------------------------------------


def _intervals(seen: Tensor) -> Tensor | None:
    """Return the visible keys of some rows as `MaskSpec.intervals`.

    Returns None if the visible keys of a query are not consecutive.
    """
    # Summing bool as int64 takes seven times as long (torch 2.13).
    starts = (seen[..., 1:] > seen[..., :-1]).sum(-1, dtype=torch.int32)
    if bool((seen[..., 0] + starts > 1).any()):
        return None
    first = seen.to(torch.uint8).argmax(-1)
    return torch.stack([first, first + seen.sum(-1, dtype=torch.int32)], dim=-1)


def _structure(first: Tensor, end: Tensor, shape: Shape) -> Mask | None:
    """Return a mask without dense tensors that has these visible intervals, or None."""
    batch, seqlen_k = shape[0], shape[3]
    seen = end > first
    begin = torch.where(seen, first, seqlen_k).amin(1, keepdim=True)
    stop = end.amax(1, keepdim=True)
    begin = torch.minimum(begin, stop)  # handles sequences without visible keys
    row = torch.arange(1, first.shape[1] + 1, device=first.device)
    key = torch.arange(seqlen_k, device=first.device)
    # A key mask, because the lengths of `padding` would move bottom-right bands.
    keys = Mask(dense_masks=(((key >= begin) & (key < stop))[:, None, None],))
    all_keys = torch.zeros_like(begin), torch.full_like(stop, seqlen_k)
    for limits, (lo, hi) in ((Mask(), all_keys), (keys, (begin, stop))):
        band, excess = _band(first, end, seen, lo, hi)
        if band is not None and not bool(excess.any()):
            return limits & band
        prefix = end[:, :1]
        own_end = torch.minimum(hi, torch.maximum(row, prefix))
        if bool((seen & (first == 0) & (end == own_end)).all()):
            return limits & prefix_lm(prefix[:, 0].expand(batch))
    return _documents(first, end, seen, seqlen_k)


def _band(
    first: Tensor, end: Tensor, seen: Tensor, begin: Tensor, stop: Tensor
) -> tuple[Mask | None, Tensor]:
    """Return the diagonal band whose visible keys in [begin, stop) are the intervals, or None.

    Also returns a tensor that is True for queries with visible keys in the band, but none in their
    interval.
    """
    row = torch.arange(first.shape[1], device=first.device)
    edges: list[int | None] = []
    for diagonal, free in ((first - row, first > begin), (end - 1 - row, end < stop)):
        chosen = diagonal[seen & free]
        if chosen.numel() == 0:
            edges.append(None)
        elif bool((chosen == chosen[0]).all()):
            edges.append(int(chosen[0]))
        else:
            return None, seen
    lo, hi = edges
    own_first = begin if lo is None else torch.maximum(begin, row + lo)
    own_end = stop if hi is None else torch.minimum(stop, row + hi + 1)
    if bool((seen & ((own_first != first) | (own_end != end))).any()):
        return None, seen
    band = diagonals(UNLIMITED if lo is None else -lo, UNLIMITED if hi is None else hi)
    return band, ~seen & (own_end > own_first)


def _documents(first: Tensor, end: Tensor, seen: Tensor, seqlen_k: int) -> Mask | None:
    """Return a mask of documents and a band, or None. No interval crosses a document boundary."""
    ones = seen.long()
    crossing = first.new_zeros(first.shape[0], seqlen_k + 2)
    crossing.scatter_add_(1, first + 1, ones).scatter_add_(1, end, -ones)
    is_start = crossing.cumsum(1)[:, :seqlen_k] == 0
    ids = is_start.cumsum(1)  # ids start at 1; 0 is for queries without visible keys
    key = torch.arange(seqlen_k, device=first.device)
    start = torch.where(is_start, key, 0).cummax(1).values
    next_start = torch.where(is_start, key, seqlen_k).flip(1).cummin(1).values.flip(1)
    stop = torch.cat([next_start[:, 1:], torch.full_like(next_start[:, :1], seqlen_k)], dim=1)
    band, _ = _band(first, end, seen, start.gather(1, first), stop.gather(1, first))
    if band is None:
        return None
    query_ids = torch.where(seen, ids.gather(1, first), 0)
    if len(ids) == 1:
        query_ids, ids = query_ids[0], ids[0]
    return documents(query_ids, ids) & band
