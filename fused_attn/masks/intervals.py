"""Conversion of masks to one key interval per query, and to lists of visible blocks.

With bands, lengths, prefixes, contiguous documents and packed sequences, the visible keys of each
query are contiguous. Two int32 tables, of the first key and the end, describe such a mask exactly.
Block-sparse engines such as FlexAttention evaluate a mask function that compares keys with these
tables, and skip the blocks that are not listed.

All tables are computed on the mask's device without a synchronization. Unless the mask has a dense
tensor, no tensor of seqlen_q x seqlen_k elements is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn.base.torch_state import host_readable
from fused_attn.masks.fields import Shape, refuse_unknown_fields
from fused_attn.masks.mask import UNLIMITED
from fused_attn.masks.spec import BOUNDS, NO_MASK, MaskSpec
from fused_attn.masks.tables import without_tables


class Rows(NamedTuple):
    """Positions of packed rows of query or key in their sequences.

    All attributes are int32 (total,), with one element per packed row.

    Attributes:
        sequence: index of the sequence of the row.
        position: position of the row in its sequence.
        first_key: packed row at which key and value of the sequence begin.
    """

    sequence: Tensor
    position: Tensor
    first_key: Tensor


@dataclass(frozen=True, eq=False)
class Intervals:
    """Mask in which a query attends to the keys in [begin, end) that `rest` does not mask.

    For packed sequences, seqlen_q and seqlen_k are the total numbers of rows of all sequences.

    Attributes:
        begin, end: int32 (1 or batch, seqlen_q), contiguous; begin == end if no key is visible.
        rest: conditions that an interval cannot express: documents that are not contiguous, dense
            tensors (including bits, and intervals that differ between heads), key masks, and -inf
            in a bias. NO_MASK if there are none.
        rows: positions of the query rows if sequences are packed, else None.
        seqlen_k: number of keys.
    """

    begin: Tensor
    end: Tensor
    rest: MaskSpec
    rows: Rows | None
    seqlen_k: int

    @property
    def exact(self) -> bool:
        """True if the intervals express the complete mask, so `rest` is NO_MASK."""
        return self.rest is NO_MASK


def intervals_of(spec: MaskSpec, shape: Shape, device: torch.device) -> Intervals:
    """Return the key interval of each query, and the conditions that intervals cannot express.

    Args:
        spec: the mask.
        shape: (batch, num_heads, seqlen_q, seqlen_k) of query and key. For packed sequences batch
            is 1, and seqlen_q and seqlen_k are total numbers of rows.
        device: device of the intervals.
    """
    refuse_unknown_fields(spec, "a block list")
    seqlen_q, seqlen_k = shape[2:]
    by_head = spec.intervals is not None and spec.intervals.shape[1] > 1
    spec = without_tables(spec, spec.max_seqlen_k or seqlen_k, intervals=by_head)
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
    if spec.intervals is not None:
        table = _of_rows(spec.intervals[:, 0], rows)
        begin, end = torch.maximum(begin, table[..., 0]), torch.minimum(end, table[..., 1])
    begin = torch.minimum(begin, end)
    if rows is not None:
        begin, end = begin + rows.first_key, end + rows.first_key
    begin, end = (t.to(torch.int32).contiguous() for t in (begin, end))
    return Intervals(begin, end, rest if rest.kind != "none" else NO_MASK, rows, seqlen_k)


def _rows(starts: Tensor, starts_k: Tensor, total: int) -> Rows:
    """Return the positions of packed rows in their sequences.

    `starts` are the cumulative lengths of the rows (cu_seqlens_q or cu_seqlens_k).
    """
    row = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    sequence = sequence.clamp(max=max(len(starts) - 2, 0))
    table = sequence, row - starts[sequence], starts_k[sequence]
    return Rows(*(t.to(torch.int32) for t in table))


def _of_rows(table: Tensor, rows: Rows | None) -> Tensor:
    """Convert a table from (1 or batch, seqlen, *) to packed rows (1, total, *).

    The table is returned unchanged if the sequences are not packed.
    """
    if rows is None:
        return table
    sequence = rows.sequence.clamp(max=table.shape[0] - 1)  # broadcasts a table of batch size 1
    return table[sequence, rows.position][None]


def _of_keys(key_mask: Tensor | None, keys: Rows | None) -> Tensor | None:
    """Convert a key mask from (1 or batch, heads, 1, 1 or seqlen_k) to packed (1, heads, 1, total).

    The mask is returned unchanged if it is None, if it broadcasts over both batch and keys, or if
    `keys` is None because the keys are not packed.
    """
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
    """Return begin and end of the keys that band, lengths and prefix allow, in [0, seqlen_k].

    `position`, (1, seqlen_q), is the position of each query in its sequence. For packed sequences,
    seqlen_k is the length of the longest.
    """
    if spec.bounds is None:
        begin = (position + max(spec.band_lo, -UNLIMITED)).clamp(0, seqlen_k)
        end = (position + min(spec.band_hi, UNLIMITED) + 1).clamp(0, seqlen_k)
        return begin, end
    # Shape (8, batch, 1), or (8, 1, total_q) for packed rows.
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
    """Return the key interval that spans the document of each query.

    Returns:
        The first key and the end (last key + 1), both (1 or batch, seqlen_q), and True if all
        documents are known to be contiguous. The flag is always False on a GPU, because reading
        the ids would synchronize.
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
    # The sort is stable: the first and the last entry of a run of equal ids are the document's
    # first and last key.
    first = order.gather(1, below.clamp(max=seqlen_k - 1))
    last = order.gather(1, (above - 1).clamp(min=0))
    begin = torch.where(below < above, first, 0)
    end = torch.where(below < above, last + 1, 0)
    contiguous = host_readable(begin) and bool((end - begin == above - below).all())
    return _of_rows(begin, rows), _of_rows(end, rows), contiguous


# ---- blocks -------------------------------------------------------------------------------------


class BlockLists(NamedTuple):
    """Visible blocks of a mask, in the format of FlexAttention's BlockMask.

    Counts are int32 (1 or batch, 1 or num_heads, blocks). Indices are int32 (1 or batch, 1 or
    num_heads, blocks, maximum number of blocks), in ascending order up to the count.

    The mask function must be evaluated in partial blocks. In a full block, no position is masked,
    except by -inf in a bias, and no position is beyond the end of the sequence.

    Attributes:
        kv_num_blocks, kv_indices: partial KV blocks for each query block.
        full_kv_num_blocks, full_kv_indices: full KV blocks for each query block.
        q_num_blocks, q_indices: partial query blocks for each KV block.
        full_q_num_blocks, full_q_indices: full query blocks for each KV block.
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
    """Return the visible blocks of a mask, in O(seqlen_q + blocks) operations if it is exact.

    Every block with a visible position is listed, and a block is full only if the intervals, key
    masks and dense tensors mask none of its positions. For exact intervals, the lists contain no
    fully masked block, and every block without masked positions is full.

    Args:
        block_size: number of queries and keys per block.
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
    """Return the blocks with a visible position, and the blocks without a masked position.

    Both are bool (1 or batch, 1 or num_heads, query blocks, KV blocks). The second ignores -inf in
    a bias.
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
    elif rest.dense is not None:  # not pooled: its indices are positions in single sequences
        full = torch.zeros_like(full)
    for tensor in tensors:
        if tensor is not None:
            visible = visible & pooled(tensor, block_size, any_of=True)
            full = full & pooled(tensor, block_size, any_of=False)
    if rest.bias is not None and intervals.rows is None:
        unmasked = rest.bias.detach() != float("-inf")
        visible = visible & pooled(unmasked, block_size, any_of=True)
    return visible, full & visible


def _rows_covering(first: Tensor, last: Tensor, block_q: int, blocks_k: int) -> Tensor:
    """Count, for each query block and KV block, the query rows whose range includes the KV block.

    The range of a query row is [first, last), both (batch, seqlen_q). The result is int32 (batch,
    query blocks, blocks_k).
    """
    batch, seqlen_q = first.shape
    blocks_q = -(-seqlen_q // block_q)
    # Add +1 where ranges begin and -1 where they end; the prefix sum over KV blocks is the count.
    width = blocks_k + 1
    row = torch.arange(seqlen_q, device=first.device) // block_q * width
    changes = torch.zeros(batch, blocks_q * width, dtype=torch.int32, device=first.device)
    one = torch.ones_like(first)
    changes.scatter_add_(1, row + first, one)
    changes.scatter_add_(1, row + last, -one)
    return changes.view(batch, blocks_q, width).cumsum(-1, dtype=torch.int32)[..., :-1]


def pooled(mask: Tensor, block_size: tuple[int, int], *, any_of: bool) -> Tensor:
    """Reduce each block of a 4-D bool mask with `any` (any_of=True) or `all` (any_of=False).

    Positions beyond the edge count as False. Query and key dimensions of size 1 keep this size, as
    they are broadcast.
    """
    sizes = mask.shape[2:]
    tile = [1 if size == 1 else block for size, block in zip(sizes, block_size, strict=True)]
    mask = F.pad(mask, (0, -sizes[1] % tile[1], 0, -sizes[0] % tile[0]))
    tiles = mask.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0]))
    return tiles.any(5).any(3) if any_of else tiles.all(5).all(3)


def unmasked_keys(intervals: Intervals, num_heads_kv: int) -> Tensor:
    """Return the keys that are visible to at least one query; all other keys may be zeroed.

    The result is exact for intervals and for key masks. A dense tensor masks a key only if the
    tensor alone masks the key for every query.

    Returns:
        bool (1 or batch, 1 or num_heads_kv, seqlen_k), True = visible.
    """
    begin, end = intervals.begin, intervals.end
    all_queries = max(begin.shape[1], 1)
    seen = _rows_covering(begin, end, all_queries, intervals.seqlen_k) > 0
    rest = intervals.rest
    for tensor in (rest.key_mask, None if intervals.rows is not None else rest.dense):
        if tensor is not None:
            seen = seen & _of_kv_heads(tensor.any(2), num_heads_kv)
    return seen


def _of_kv_heads(mask: Tensor, num_heads_kv: int) -> Tensor:
    """Combine the query heads that share a KV head with `any`.

    Converts a mask from (batch, 1 or num_heads, seqlen_k) to (batch, 1 or num_heads_kv, seqlen_k).
    """
    if mask.shape[1] == 1:
        return mask
    return mask.unflatten(1, (num_heads_kv, -1)).any(2)
