"""Masks as one interval of visible keys for each query, and the lists of visible blocks.

Bands, lengths, prefixes, contiguous documents and packed sequences make the keys that a query
attends to one run of keys. Two int32 tables describe such a mask exactly. Block-sparse engines such
as FlexAttention take them as a mask function with two comparisons, and take the blocks computed
here. Everything is computed on the mask's device, without a synchronization and without a tensor of
seqlen_q x seqlen_k elements, unless the mask has a dense tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn.base.torch_state import host_readable
from fused_attn.masks.mask import UNLIMITED
from fused_attn.masks.spec import BOUNDS, NO_MASK, MaskSpec

Shape = tuple[int, int, int, int]


class Rows(NamedTuple):
    """Position of each query row in its sequence; needed for packed sequences only.

    Attributes:
        sequence: int32 (seqlen_q,), the index of the sequence.
        position: int32 (seqlen_q,), the position in the sequence.
        first_key: int32 (seqlen_q,), the row of key and value where the sequence begins.
    """

    sequence: Tensor
    position: Tensor
    first_key: Tensor


@dataclass(frozen=True, eq=False)
class Intervals:
    """Visible keys of each query: those in [begin, end) that `rest` allows.

    For packed sequences, seqlen_q and seqlen_k count the rows of all sequences.

    Attributes:
        begin, end: int32 (1 or batch, seqlen_q), contiguous; begin == end if no key is visible.
        rest: the conditions that the interval does not express (documents that are not contiguous
            runs, dense tensors, key masks, -inf in a bias); NO_MASK if there are none.
        rows: positions of the rows of packed sequences, else None.
        seqlen_k: number of keys.
    """

    begin: Tensor
    end: Tensor
    rest: MaskSpec
    rows: Rows | None
    seqlen_k: int

    @property
    def exact(self) -> bool:
        """True if the intervals alone are the mask."""
        return self.rest is NO_MASK


def intervals_of(spec: MaskSpec, shape: Shape, device: torch.device) -> Intervals:
    """Return the intervals of a mask.

    Args:
        shape: (batch, num_heads, seqlen_q, seqlen_k) of query and key; batch is 1 if packed.
    """
    seqlen_q, seqlen_k = shape[2:]
    rows = keys = None
    position, length = torch.arange(seqlen_q, device=device)[None], seqlen_k
    if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
        rows = _rows(spec.cu_seqlens_q, spec.cu_seqlens_k, seqlen_q)
        keys = _rows(spec.cu_seqlens_k, spec.cu_seqlens_k, seqlen_k)
        position, length = rows.position[None], spec.max_seqlen_k
    begin, end = _of_bounds(spec, rows, position, length)
    rest = MaskSpec(dense=spec.dense, bias=spec.bias, key_mask=_of_keys(spec.key_mask, keys))
    if spec.query_documents is not None and spec.key_documents is not None:
        first, last, contiguous = _of_documents(spec, rows, position)
        begin, end = torch.maximum(begin, first), torch.minimum(end, last)
        if not contiguous:
            rest.query_documents = _of_rows(spec.query_documents, rows)
            rest.key_documents = _of_rows(spec.key_documents, keys)
    begin = torch.minimum(begin, end)
    if rows is not None:
        begin, end = begin + rows.first_key, end + rows.first_key
    begin, end = (t.to(torch.int32).contiguous() for t in (begin, end))
    return Intervals(begin, end, rest if rest.kind != "none" else NO_MASK, rows, seqlen_k)


def _rows(starts: Tensor, starts_k: Tensor, total: int) -> Rows:
    """Return the positions of `total` packed rows of sequences that begin at `starts`."""
    row = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    sequence = sequence.clamp(max=max(len(starts) - 2, 0))
    table = sequence, row - starts[sequence], starts_k[sequence]
    return Rows(*(t.to(torch.int32) for t in table))


def _of_rows(table: Tensor, rows: Rows | None) -> Tensor:
    """Return a table (1 or batch, seqlen, *) of sequences as one of packed rows, (1, total, *)."""
    if rows is None:
        return table
    sequence = rows.sequence.clamp(max=table.shape[0] - 1)  # size 1: the same for each sequence
    return table[sequence, rows.position][None]


def _of_keys(key_mask: Tensor | None, keys: Rows | None) -> Tensor | None:
    """Return a key mask (1 or batch, heads, 1, 1 or seqlen_k) for packed keys."""
    if key_mask is None or keys is None or key_mask.shape[3] == 1 == key_mask.shape[0]:
        return key_mask
    if key_mask.shape[3] == 1:
        sequence = keys.sequence.long()
        return key_mask[sequence, :, :, 0].permute(1, 2, 0)[None]
    packed = _of_rows(key_mask[:, :, 0].transpose(1, 2), keys)  # (1, total, heads)
    return packed.transpose(1, 2)[:, :, None]


def _of_bounds(
    spec: MaskSpec, rows: Rows | None, position: Tensor, seqlen_k: int
) -> tuple[Tensor, Tensor]:
    """Return the intervals that band, lengths and prefix allow, in [0, seqlen_k].

    Args:
        position: (1, seqlen_q), the position of each query in its sequence.
    """
    if spec.bounds is None:
        begin = (position + max(spec.band_lo, -UNLIMITED)).clamp(0, seqlen_k)
        end = (position + min(spec.band_hi, UNLIMITED) + 1).clamp(0, seqlen_k)
        return begin, end
    # (8, batch, 1), or (8, 1, total_q) for packed rows.
    columns = spec.bounds.T[:, :, None] if rows is None else spec.bounds[rows.sequence].T[:, None]
    bound = dict(zip(BOUNDS, columns, strict=True))
    begin, end = bound["key_begin"], bound["key_end"]
    if spec.by_query:
        begin = torch.maximum(begin, position + bound["band_lo"])
        end = torch.minimum(end, position + bound["band_hi"] + 1)
        prefix = bound["prefix_end"]
        causal_or_prefix = torch.maximum(prefix, position + 1)
        end = torch.where(prefix > 0, torch.minimum(end, causal_or_prefix), end)
        real = (position >= bound["query_begin"]) & (position < bound["query_end"])
        end = torch.where(real, end, 0)
    begin, end = begin.clamp(0, seqlen_k), end.clamp(0, seqlen_k)
    shape = torch.broadcast_shapes(begin.shape, position.shape)
    return begin.expand(shape), end.expand(shape)


def _of_documents(
    spec: MaskSpec, rows: Rows | None, position: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """Return the first key of each query's document, the end of its last one, and whether all
    documents are known to be contiguous runs of keys.

    On a GPU that is not known, as reading it would need a synchronization.
    """
    queries, keys = spec.query_documents, spec.key_documents
    assert queries is not None and keys is not None
    batch, seqlen_k = max(queries.shape[0], keys.shape[0]), keys.shape[1]
    if seqlen_k == 0:
        nothing = torch.zeros_like(position)
        return nothing, nothing, True
    ids, order = keys.expand(batch, -1).sort(dim=-1, stable=True)
    wanted = queries.expand(batch, -1).contiguous()
    below, above = torch.searchsorted(ids, wanted), torch.searchsorted(ids, wanted, right=True)
    # The sort is stable, so the ends of a run of equal ids are the first and the last key.
    first = order.gather(1, below.clamp(max=seqlen_k - 1))
    last = order.gather(1, (above - 1).clamp(min=0))
    begin = torch.where(below < above, first, 0)
    end = torch.where(below < above, last + 1, 0)
    contiguous = host_readable(begin) and bool((end - begin == above - below).all())
    return _of_rows(begin, rows), _of_rows(end, rows), contiguous


# ---- blocks -------------------------------------------------------------------------------------


class BlockLists(NamedTuple):
    """Visible blocks in the form of FlexAttention's BlockMask.

    Each pair is the number of blocks, int32 (1 or batch, 1 or num_heads, blocks), and their
    ascending indices, int32 (1 or batch, 1 or num_heads, blocks, maximum number). A partial block
    needs the mask function. In a full block, which ends within the sequence, every position is
    visible, or masked by a bias only.

    Attributes:
        kv_num_blocks, kv_indices: partial KV blocks of each query block.
        full_kv_num_blocks, full_kv_indices: its full KV blocks.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the transposed lists, of the
            query blocks of each KV block.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def block_lists(intervals: Intervals, block_size: tuple[int, int]) -> BlockLists:
    """Return the visible blocks of a mask, by O(seqlen_q + blocks) operations if it is exact.

    No visible block is missing and no full block has a masked position. If the mask is exact, no
    other block is listed, and every block that could be full is.

    Args:
        block_size: queries and keys of a block.
    """
    visible, full = _block_matrices(intervals, block_size)
    partial = visible & ~full
    lists: list[Tensor] = []
    for matrix in (partial, full, partial.mT, full.mT):
        lists.append(matrix.sum(-1, dtype=torch.int32))
        order = matrix.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        lists.append(order.to(torch.int32).contiguous())
    return BlockLists(*lists)


def _block_matrices(intervals: Intervals, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return which blocks have a visible position, and which have no masked one.

    Both are bool (1 or batch, 1 or num_heads, query blocks, KV blocks).
    """
    block_q, block_k = block_size
    begin, end, seqlen_k = intervals.begin, intervals.end, intervals.seqlen_k
    blocks_k = -(-seqlen_k // block_k)
    first, last = begin // block_k, (end + block_k - 1) // block_k
    last = torch.where(begin < end, last, first)
    visible = _rows_covering(first, last, block_q, blocks_k) > 0
    first, last = (begin + block_k - 1) // block_k, end // block_k
    full = _rows_covering(first, torch.maximum(first, last), block_q, blocks_k) == block_q
    visible, full = visible[:, None], full[:, None]
    rest = intervals.rest
    if rest.query_documents is not None:
        full = torch.zeros_like(full)
    tensors = [rest.key_mask]
    if intervals.rows is None:
        tensors.append(rest.dense)
    elif rest.dense is not None:  # indexed by the positions of single sequences
        full = torch.zeros_like(full)
    for tensor in tensors:
        if tensor is not None:
            visible = visible & _pooled(tensor, block_size, any_of=True)
            full = full & _pooled(tensor, block_size, any_of=False)
    if rest.bias is not None and intervals.rows is None:
        unmasked = rest.bias.detach() != float("-inf")
        visible = visible & _pooled(unmasked, block_size, any_of=True)
    return visible, full & visible


def _rows_covering(first: Tensor, last: Tensor, block_q: int, blocks_k: int) -> Tensor:
    """Count, for each query block and KV block, the rows whose range of KV blocks contains it.

    Args:
        first, last: (batch, seqlen_q), each row's range of KV blocks [first, last).

    Returns:
        int32 (batch, query blocks, blocks_k).
    """
    batch, seqlen_q = first.shape
    blocks_q = -(-seqlen_q // block_q)
    # The prefix sum of +1 where ranges begin and -1 where they end.
    width = blocks_k + 1
    row = torch.arange(seqlen_q, device=first.device) // block_q * width
    changes = torch.zeros(batch, blocks_q * width, dtype=torch.int32, device=first.device)
    one = torch.ones_like(first)
    changes.scatter_add_(1, row + first, one)
    changes.scatter_add_(1, row + last, -one)
    return changes.view(batch, blocks_q, width).cumsum(-1, dtype=torch.int32)[..., :-1]


def _pooled(mask: Tensor, block_size: tuple[int, int], *, any_of: bool) -> Tensor:
    """Reduce the blocks of a 4-D bool mask to whether any, or all, of their positions are True.

    Positions beyond the edge are False. A dimension of size 1 is broadcast, and stays of size 1.
    """
    sizes = mask.shape[2:]
    tile = [1 if size == 1 else block for size, block in zip(sizes, block_size, strict=True)]
    mask = F.pad(mask, (0, -sizes[1] % tile[1], 0, -sizes[0] % tile[0]))
    tiles = mask.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0]))
    return tiles.any(5).any(3) if any_of else tiles.all(5).all(3)


def unmasked_keys(intervals: Intervals, num_heads_kv: int) -> Tensor:
    """Return which keys some query attends to, so that the others can be cleared.

    Exact for intervals and key masks. For a dense tensor, a key counts as masked if the tensor
    alone masks it for every query.

    Returns:
        bool (1 or batch, 1 or num_heads_kv, seqlen_k).
    """
    begin, end = intervals.begin, intervals.end
    changes = torch.zeros(
        begin.shape[0], intervals.seqlen_k + 1, dtype=torch.int32, device=begin.device
    )
    one = torch.ones_like(begin)
    changes.scatter_add_(1, begin.long(), one)
    changes.scatter_add_(1, end.long(), -one)
    seen = (changes.cumsum(-1)[:, :-1] > 0)[:, None]
    rest = intervals.rest
    for tensor in (rest.key_mask, None if intervals.rows is not None else rest.dense):
        if tensor is not None:
            seen = seen & _of_kv_heads(tensor.any(2), num_heads_kv)
    return seen


def _of_kv_heads(mask: Tensor, num_heads_kv: int) -> Tensor:
    """Combine the heads that share a KV head, in a mask (batch, 1 or num_heads, seqlen_k)."""
    if mask.shape[1] == 1:
        return mask
    return mask.unflatten(1, (num_heads_kv, -1)).any(2)
