"""Attention over sequences whose positions are distributed over ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fused_attn.base import philox
from fused_attn.base.autocast import autocast
from fused_attn.base.shapes import canonical
from fused_attn.call.options import AttentionOptions
from fused_attn.call.validation import check_float, check_packed, check_qkv
from fused_attn.distributed.agreement import check_agreement
from fused_attn.distributed.all_to_all import HeadExchange, attend_to_all
from fused_attn.distributed.caching import cached_on_mask
from fused_attn.distributed.plan import Plan, plan_of
from fused_attn.distributed.ranks import Mesh, Ranks, ranks_of
from fused_attn.distributed.ring import Ring, ring
from fused_attn.distributed.sharding import Sharding, runs_of
from fused_attn.masks import Mask, as_mask
from fused_attn.masks.restrict import of_heads
from fused_attn.masks.spec import BOUNDS, MaskSpec, normalize
from fused_attn.masks.visible_keys import VisibleKeys
from fused_attn.varlen import packed_spec

Positions = Tensor | Sharding | None
Method = Literal["auto", "ring", "all_to_all"]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    *,
    positions: Positions | tuple[Positions, Positions] = None,
    mesh: Mesh = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled_dot_product_attention over a sequence that is distributed over ranks.

    Each rank passes its rows of query, key and value, and receives its rows of out. The result is
    that of one process with the complete sequence, including dropout. Ranks exchange only the keys
    that their queries attend to, and no mask is too complicated.

    All ranks must make the same calls in the same order. The gradient of a learned bias is the part
    of this rank's queries; add up the ranks, as for any other parameter. There are no second
    derivatives.

    Args:
        query: (batch, num_heads, rows, head_dim), the queries of this rank. With cu_seqlens_q,
            (rows, num_heads, head_dim).
        key: (batch, num_heads_kv, rows_k, head_dim), the keys of this rank.
        value: (batch, num_heads_kv, rows_k, head_dim_v).
        attn_mask: mask of the complete sequence, the same on all ranks: as in
            scaled_dot_product_attention, for all positions. With cu_seqlens_q, as in
            varlen_attention.
        positions: the positions of this rank's rows, integers of shape (rows,), or a Sharding of
            all ranks. None means that the ranks hold consecutive positions in their order. A pair
            gives the positions of queries and of keys; otherwise they are the same. Only with a
            Sharding, a call needs no communication beside keys and values.
        mesh: one-dimensional DeviceMesh or process group of the ranks; None means all processes. A
            two-dimensional mesh uses this function between the ranks of its first dimension, and
            all_to_all_attention between those of its second.
        dropout_p: probability of dropping an attention weight.
        is_causal: apply a causal mask (top-left).
        scale, enable_gqa, softcap: as in scaled_dot_product_attention.
        seed: dropout seed, the same on all ranks; None means that the first rank draws one.
        return_lse: also return lse.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,), cumulative lengths of all packed sequences, of
            all ranks. cu_seqlens_k is cu_seqlens_q by default.

    Returns:
        out, (batch, num_heads, rows, head_dim_v), or (rows, num_heads, head_dim_v) if packed. With
        return_lse, also lse, (batch, num_heads, rows) or (num_heads, rows), float32 (float64 for
        float64 inputs).

    Raises:
        ValueError, TypeError: an argument is invalid, or differs between ranks.
        RuntimeError: a rank failed or did not answer within the timeout of the process group.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers".

    Example:
        >>> query, key, value = (torch.randn(1, 8, 512, 64) for _ in range(3))  # of this rank
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.documents(ids)  # doctest: +SKIP
        >>> out = fused_attn.distributed.ring_attention(query, key, value, mask)  # doctest: +SKIP
    """
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    lengths = cu_seqlens_q, cu_seqlens_k
    call = (query, key, value, attn_mask, is_causal, enable_gqa, positions, lengths, options)
    out, lse = attend(*call, ranks_of(mesh), "ring")
    return (out, lse) if return_lse else out


def all_to_all_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    *,
    positions: Positions | tuple[Positions, Positions] = None,
    mesh: Mesh = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled_dot_product_attention over a sequence that is distributed over ranks.

    As ring_attention, but each rank computes some of the heads for all positions: it exchanges its
    rows of all heads for all rows of its heads before attention, and back after it.

    Args:
        query: as in ring_attention. num_heads must be at least the number of ranks. If fewer KV
            heads than ranks exist, they are sent to several ranks.
        mesh: as in ring_attention, but a one-dimensional mesh uses this function.

    The other arguments, results and errors are those of ring_attention.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    lengths = cu_seqlens_q, cu_seqlens_k
    call = (query, key, value, attn_mask, is_causal, enable_gqa, positions, lengths, options)
    out, lse = attend(*call, ranks_of(mesh), "all_to_all")
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Shards:
    """The Shardings of queries and keys; rank is the index of this process in the whole mesh."""

    queries: Sharding
    keys: Sharding
    rank: int

    def merged(self, size: int) -> _Shards:
        """Return the shards of groups of `size` consecutive ranks."""
        if size == 1:
            return self
        same = self.queries is self.keys
        queries = self.queries.merged(size)
        return _Shards(queries, queries if same else self.keys.merged(size), self.rank // size)


@torch.compiler.disable(recursive=True)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None,
    is_causal: bool,
    enable_gqa: bool,
    positions: Any,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    options: AttentionOptions,
    groups: list[Ranks],
    method: Method,
    heads: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the rows of this rank; see `ring_attention`.

    Args:
        groups: the ranks of each dimension of the mesh. The index of a rank in the mesh is
            groups[0].rank * groups[1].size + groups[1].rank.
        method: which function to use for a one-dimensional mesh; "auto" chooses the one that sends
            fewer bytes.
        heads: (first head, number of heads) of the given heads in a larger call, whose mask
            attn_mask is. None means that the call has all heads.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_float(name, tensor)
    query, key, value = autocast(query, key, value)
    packed = cu_seqlens[0] is not None
    if packed:
        check_packed(query, key, value)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    check_qkv(query, key, value)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(f"query must have 4 dimensions, got {tuple(query.shape)}")
    query, key, value, _, _ = canonical(query, key, value, None, enable_gqa or packed)
    shards = _shards_of(positions, query, key, groups)
    num_heads = query.shape[1]
    first, total = (0, num_heads) if heads is None else heads
    spec, starts = _spec(attn_mask, is_causal, cu_seqlens, shards, query, total)
    if total > num_heads:
        spec = of_heads(spec, slice(first, first + num_heads))
    options = options.checked(query.shape[3], query.device)
    for ranks in groups:
        check_agreement(ranks, spec, _sizes(query, key, value, options, shards), query.device)
    options = _seeded(options, groups, query.device)
    ring_ranks, head_ranks = _roles(groups, method, spec, shards, query, key)
    exchange = None
    if head_ranks is not None:
        exchange = HeadExchange(
            head_ranks, shards.queries, shards.keys, shards.rank, *_heads(query, key)
        )
        query, key, value = exchange.gathered(query, key, value)
        spec, first = exchange.mask(spec), first + exchange.heads.start
    shards = shards.merged(1 if head_ranks is None else head_ranks.size)
    if ring_ranks is None:
        out, lse = attend_to_all(query, key, value, spec, options, (first, total))
    else:
        plan = _plan(spec, shards, query, options.dropout_p > 0.0, starts)
        out, lse = ring(query, key, value, spec, Ring(ring_ranks, plan, options, (first, total)))
    if exchange is not None:
        out, lse = exchange.returned(out, lse)
    if packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    return out, lse


def _roles(
    groups: list[Ranks],
    method: Method,
    spec: MaskSpec,
    shards: _Shards,
    query: Tensor,
    key: Tensor,
) -> tuple[Ranks | None, Ranks | None]:
    """Return the ranks that exchange keys and values, and those that exchange heads."""
    if len(groups) > 1:
        return groups[0], groups[1]
    size, num_heads, num_heads_kv = groups[0].size, query.shape[1], key.shape[1]
    if method == "auto" and num_heads >= size:
        # Rows of one head that a rank receives in a forward. All-to-all: query, key, value, and out
        # returned. Ring: about the keys and values that a query attends to.
        rows = shards.queries.length / size * (1 - 1 / size)
        by_heads = (2 * num_heads + 2 * max(num_heads_kv, size)) * rows / size
        by_keys = 2 * num_heads_kv * _mean_visible(spec, shards, query)
        method = "all_to_all" if by_heads < by_keys else "ring"
    return (None, groups[0]) if method == "all_to_all" else (groups[0], None)


def _mean_visible(spec: MaskSpec, shards: _Shards, query: Tensor) -> float:
    """Return the mean number of keys that a query attends to."""
    shape = (query.shape[0], query.shape[1], shards.queries.length, shards.keys.length)

    def make() -> float:
        return VisibleKeys(spec, shape).mean_work

    what = ("mean work", *shape)
    return cached_on_mask(spec, what, query.device, make, with_bias=False)


def _heads(query: Tensor, key: Tensor) -> tuple[int, int]:
    return query.shape[1], key.shape[1]


def _sizes(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: _Shards
) -> dict[str, int]:
    """Return everything that must be the same on all ranks, except the mask."""
    return {
        "batch": query.shape[0],
        "num_heads": query.shape[1],
        "num_heads_kv": key.shape[1],
        "head_dim": query.shape[3],
        "head_dim_v": value.shape[3],
        "itemsize of query": query.dtype.itemsize,
        "positions": hash((shards.queries, shards.keys)),
        "scale, softcap and dropout_p": hash((options.scale, options.softcap, options.dropout_p)),
    }


def _shards_of(positions: Any, query: Tensor, key: Tensor, groups: list[Ranks]) -> _Shards:
    """Return who holds which positions, asking the other ranks unless Shardings are given."""
    pair = positions if isinstance(positions, tuple) else (positions, positions)
    if len(pair) != 2:
        raise ValueError(f"positions must be one value or a pair, got {len(pair)} values")
    same = pair[0] is pair[1] and query.shape[2] == key.shape[2]
    queries = _sharding("query", pair[0], query, groups)
    keys = queries if same else _sharding("key", pair[1], key, groups)
    rank = 0
    for ranks in groups:
        rank = rank * ranks.size + ranks.rank
    return _Shards(queries, keys, rank)


def _sharding(name: str, positions: Positions, tensor: Tensor, groups: list[Ranks]) -> Sharding:
    """Return the Sharding of query or key."""
    size, rank = 1, 0
    for ranks in groups:
        size, rank = size * ranks.size, rank * ranks.size + ranks.rank
    rows = tensor.shape[2]
    if not isinstance(positions, Sharding):
        return _gathered(name, positions, rows, groups, tensor.device)
    if positions.ranks != size:
        raise ValueError(f"positions must be a Sharding of {size} ranks, got {positions.ranks}")
    if positions.rows(rank) != rows:
        raise ValueError(
            f"{name} must have {positions.rows(rank)} rows on rank {rank} (as positions), "
            f"got {rows}"
        )
    return positions


def _gathered(
    name: str, positions: Tensor | None, rows: int, groups: list[Ranks], device: torch.device
) -> Sharding:
    """Return the Sharding of the positions that each rank passes.

    If this rank's are invalid, it still takes part in the communication, so all ranks raise.
    """
    runs: tuple[range, ...] = (range(rows),)
    valid = True
    if positions is not None:
        valid = isinstance(positions, Tensor) and positions.shape == (rows,)
        valid = valid and not positions.is_floating_point()
        runs = runs_of(positions.tolist()) if valid else ()
    own = [[len(runs), int(valid)]]
    table = [(run.start, run.stop) for run in runs]
    gathered: list[list[Any]] = [[own[0], table]]
    for ranks in reversed(groups):
        gathered = _exchanged(ranks, gathered, device)
    if not all(valid for (_, valid), _ in gathered):
        raise ValueError(
            f"positions must be integers of shape ({rows},) (rows of {name}) on every rank, "
            f"got {getattr(positions, 'shape', positions)}"
        )
    if positions is None:
        return Sharding.of_lengths([table[0][1] for _, table in gathered])
    return Sharding([[range(a, b) for a, b in table] for _, table in gathered])


def _exchanged(ranks: Ranks, own: list[list[Any]], device: torch.device) -> list[list[Any]]:
    """Gather the run tables of all ranks of a group: first their sizes, then the tables."""
    sizes = ranks.gather([n for (count, valid), _ in own for n in (count, valid)], device)
    counts = [[row[i : i + 2] for i in range(0, len(row), 2)] for row in sizes]
    most = max(sum(count for count, _ in row) for row in counts)
    numbers = [n for _, table in own for run in table for n in run]
    rows = ranks.gather(numbers + [0] * (2 * most - len(numbers)), device)
    tables = []
    for row, of_rank in zip(rows, counts, strict=True):
        at = 0
        for count, valid in of_rank:
            pairs = [tuple(row[i : i + 2]) for i in range(at, at + 2 * count, 2)]
            tables.append([[count, valid], pairs])
            at += 2 * count
    return tables


def _spec(
    attn_mask: Tensor | Mask | None,
    is_causal: bool,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    shards: _Shards,
    query: Tensor,
    num_heads: int,
) -> tuple[MaskSpec, tuple[list[int], list[int]] | None]:
    """Return the MaskSpec of all positions, and the cumulative lengths of packed sequences."""
    of_queries, of_keys = cu_seqlens
    mask = as_mask(attn_mask, is_causal and of_queries is None)
    lengths = shards.queries.length, shards.keys.length
    if of_queries is None:
        if of_keys is not None:
            raise ValueError("cu_seqlens_k must be given together with cu_seqlens_q")
        return normalize(mask, query.shape[0], num_heads, lengths[0], lengths[1], query), None
    of_keys = of_queries if of_keys is None else of_keys
    starts = of_queries.tolist(), of_keys.tolist()
    longest = [max((b - a for a, b in itertools.pairwise(s)), default=0) for s in starts]
    row = query.new_empty(1, num_heads, 1)
    rows = [row.expand(length, -1, -1) for length in lengths]  # in place of those of all ranks
    spec = packed_spec(
        rows[0], rows[1], of_queries, of_keys, longest[0], longest[1], mask, is_causal
    )
    return spec, starts


def _seeded(options: AttentionOptions, groups: list[Ranks], device: torch.device) -> Any:
    """Return the options with the seed that the first rank draws, unless there is one."""
    if options.dropout_p == 0.0 or options.seed is not None:
        return options
    seed = philox.new_seed(device)
    for ranks in groups:
        seed = ranks.broadcast(seed)
    return replace(options, seed=seed)


def _plan(
    spec: MaskSpec,
    shards: _Shards,
    query: Tensor,
    dropout: bool,
    starts: tuple[list[int], list[int]] | None,
) -> Plan:
    """Return the plan of this rank, which is cached on the mask."""

    def make() -> Plan:
        shape = (query.shape[0], query.shape[1], shards.queries.length, shards.keys.length)
        bounds = spec.bounds
        prefix = bounds is not None and bool((bounds[:, BOUNDS.index("prefix_end")] > 0).any())
        return plan_of(
            shards.queries, shards.keys, shards.rank, VisibleKeys(spec, shape),
            starts=starts, prefix=prefix, dropout=dropout,
        )  # fmt: skip

    what = ("ring", shards.queries, shards.keys, shards.rank, dropout, query.shape[:2])
    return cached_on_mask(spec, what, query.device, make, with_bias=False)
