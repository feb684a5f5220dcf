"""Arguments of distributed attention: their validation, and their comparison between ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

from torch import Tensor

from fused_attn.base.autocast import autocast
from fused_attn.base.shapes import Canonical, canonical
from fused_attn.base.torch_state import FLOATS, needs_grad
from fused_attn.call.attention import AttentionOptions
from fused_attn.call.packed import packed_spec
from fused_attn.call.validation import check_floats, check_qkv
from fused_attn.distributed.agreement import agreed
from fused_attn.distributed.checksum import checksum
from fused_attn.distributed.ranks import Ranks, gather_on_mesh, index_of, size_of
from fused_attn.distributed.sharding import Runs, Sharding, runs_of
from fused_attn.masks import Mask, as_mask
from fused_attn.masks.restrict import of_heads
from fused_attn.masks.spec import MaskSpec, spec_of_mask

Positions = Tensor | Sharding | None
Method = Literal["auto", "ring", "all_to_all"]
METHODS: tuple[Method, ...] = get_args(Method)
Starts = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Arguments:
    """Unvalidated arguments; see `ring_attention`.

    Attributes:
        cu_seqlens: cu_seqlens_q and cu_seqlens_k, or None.
        method: the function to use for a one-dimensional mesh; "auto" selects the one that sends
            fewer bytes.
        heads: (first head of this call, number of heads of the larger call that attn_mask
            describes). None means that the call has all heads.
        backend: name of the backend that the caller requested, or None.
        error: an error that the caller has found, or None. It is raised on this rank after the
            others have been informed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | Mask | None
    is_causal: bool
    enable_gqa: bool
    positions: Any  # Positions, or a pair of them
    options: AttentionOptions
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
    method: Method = "auto"
    heads: tuple[int, int] | None = None
    backend: str | None = None
    error: Exception | None = None

    @property
    def packed(self) -> bool:
        """True if sequences are packed."""
        return self.cu_seqlens[0] is not None


@dataclass(frozen=True)
class Shards:
    """The Shardings of queries and keys; rank is the index of this process in the whole mesh."""

    queries: Sharding
    keys: Sharding
    rank: int

    def merged(self, size: int) -> Shards:
        """Return the shards of groups of `size` consecutive ranks."""
        same = self.queries is self.keys
        queries = self.queries.merged(size)
        return Shards(queries, queries if same else self.keys.merged(size), self.rank // size)


@dataclass(frozen=True)
class Prepared:
    """Validated arguments, consistent with those of the other ranks.

    Attributes:
        inputs: 4-D tensors with the rows of this rank, and leading dimensions of the results.
        options: validated options.
        spec: mask of all positions and of the heads of the call.
        shards: the positions of each rank.
        starts: cumulative lengths of packed sequences, or None.
        heads: as in Arguments, never None.
    """

    inputs: Canonical
    options: AttentionOptions
    spec: MaskSpec
    shards: Shards
    starts: Starts | None
    heads: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, num_heads, seqlen_q, seqlen_k) of the complete call."""
        lengths = self.shards.queries.length, self.shards.keys.length
        batch, num_heads = self.inputs.query.shape[:2]
        return batch, num_heads, *lengths


@dataclass
class _Local:
    """Arguments that this rank has validated without communication."""

    inputs: Canonical
    options: AttentionOptions
    mask: Mask | None
    positions: tuple[Positions, Positions]
    runs: tuple[Runs, Runs]  # runs of positions that are tensors; otherwise empty


def prepared(call: Arguments, groups: list[Ranks]) -> Prepared:
    """Validate the arguments and compare them with those of the other ranks.

    Raises:
        ValueError, TypeError: an argument is invalid on this or another rank, or differs.
    """
    local, error = None, call.error
    try:
        local = None if error is not None else _local(call, groups)
    except (ValueError, TypeError) as raised:
        error = raised
    shared = own = {}
    if local is not None:
        shared = _shared(call, local)
        names = "query", "key", "runs of query", "runs of key"  # numbers of rows and of runs
        query, key = local.inputs[:2]
        sizes = query.shape[2], key.shape[2], *map(len, local.runs)
        own = dict(zip(names, sizes, strict=True))
    of_ranks = agreed(groups, shared, own, error, call.query.device)
    assert local is not None
    queries = _sharding("query", local, of_ranks, groups)
    keys = queries
    if local.positions[1] is not local.positions[0] or local.positions[0] is None:
        keys = _sharding("key", local, of_ranks, groups)
        keys = queries if keys == queries else keys
    shards = Shards(queries, keys, index_of(groups))
    num_heads = local.inputs.query.shape[1]
    heads = (0, num_heads) if call.heads is None else call.heads
    spec, starts = _spec(call, local, shards, heads[1])
    if heads[1] > num_heads:
        spec = of_heads(spec, slice(heads[0], heads[0] + num_heads))
    return Prepared(local.inputs, local.options, spec, shards, starts, heads)


def _local(call: Arguments, groups: list[Ranks]) -> _Local:
    """Validate everything that this rank can validate without communication."""
    query, key, value = call.query, call.key, call.value
    check_floats({"query": query, "key": key, "value": value})
    query, key, value = autocast(query, key, value)
    if call.packed:
        check_floats({"query": query, "key": key, "value": value}, 3)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    elif call.cu_seqlens[1] is not None:
        raise ValueError("cu_seqlens_q must be given if cu_seqlens_k is given, got None")
    check_qkv(query, key, value)
    inputs = canonical(query, key, value, None, call.enable_gqa or call.packed)
    q, k = inputs[:2]
    mask = as_mask(call.attn_mask, call.is_causal and not call.packed)
    given = call.positions
    if isinstance(given, tuple) and len(given) != 2:
        raise ValueError(
            "positions must be one value for query and key, or a pair of values (for query, for "
            f"key), got a tuple of {len(given)}"
        )
    pair = given if isinstance(given, tuple) else (given, given)
    for name, positions, tensor in (("query", pair[0], q), ("key", pair[1], k)):
        check_positions(name, positions, tensor.shape[2], groups)
    options = call.options.checked(q.shape[3], q.device)
    runs = tuple(runs_of(p) if isinstance(p, Tensor) else () for p in pair)
    return _Local(inputs, options, mask, pair, (runs[0], runs[1]))


def check_positions(name: str, positions: Any, rows: int, groups: list[Ranks]) -> None:
    """Raise ValueError or TypeError unless positions fit the rows of this rank."""
    if positions is None:
        return
    if isinstance(positions, Sharding):
        size, rank = size_of(groups), index_of(groups)
        if positions.ranks != size:
            raise ValueError(
                f"positions must be a Sharding over {size} ranks, got one over {positions.ranks}"
            )
        if positions.rows(rank) != rows:
            expected = f"{positions.rows(rank)} rows on rank {rank} (like positions)"
            raise ValueError(f"{name} must have {expected}, got {rows}")
        return
    if not isinstance(positions, Tensor):
        got = type(positions).__name__
        raise TypeError(f"positions must be a tensor, a Sharding or None, got {got}")
    if positions.shape != (rows,) or positions.is_floating_point():
        got = f"{positions.dtype} of shape {tuple(positions.shape)}"
        raise ValueError(
            f"positions must be an integer tensor of shape ({rows},) (rows of {name}), got {got}"
        )


def _shared(call: Arguments, local: _Local) -> dict[str, int]:
    """Return the values that must be equal on all ranks."""
    query, key, value = local.inputs[:3]
    options = local.options
    seed = call.options.seed
    of_queries, of_keys = map(fingerprint, local.positions)
    return {
        "batch": query.shape[0],
        "num_heads": query.shape[1],
        "num_heads_kv": key.shape[1],
        "head_dim": query.shape[3],
        "head_dim_v": value.shape[3],
        "dtype": FLOATS.index(query.dtype),
        "scale, softcap and dropout_p": hash((options.scale, options.softcap, options.dropout_p)),
        "seed": (int(seed) + 2**63) % 2**64 - 2**63 if isinstance(seed, Integral) else 0,
        "method": METHODS.index(call.method),
        "heads of the global call": hash(call.heads or (0, 0)),
        "requires_grad of query, key and value": sum(
            needs_grad(tensor) << i for i, tensor in enumerate((query, key, value))
        ),
        "attn_mask": checksum(local.mask, call.cu_seqlens),
        "positions": of_queries,
        "positions of keys": of_keys,
    }


def fingerprint(positions: Positions) -> int:
    """Return 0 for None, 1 for a tensor, and the hash of a Sharding."""
    return hash(positions) if isinstance(positions, Sharding) else int(positions is not None)


def _sharding(
    name: str, local: _Local, of_ranks: list[dict[str, int]], groups: list[Ranks]
) -> Sharding:
    """Return the Sharding of query or key, gathering positions from other ranks if necessary."""
    which = ("query", "key").index(name)
    positions = local.positions[which]
    if isinstance(positions, Sharding):
        return positions
    if positions is None:
        return Sharding.of_lengths([rank[name] for rank in of_ranks])
    most = max(1, *(rank[f"runs of {name}"] for rank in of_ranks))
    table = [n for run in local.runs[which] for n in (run.start, run.stop)]
    rows = gather_on_mesh(groups, table + [0] * (2 * most - len(table)), local.inputs.query.device)
    return Sharding(
        [[range(a, b) for a, b in zip(row[::2], row[1::2], strict=True)] for row in rows]
    )


def _spec(
    call: Arguments, local: _Local, shards: Shards, num_heads: int
) -> tuple[MaskSpec, Starts | None]:
    """Return the MaskSpec of all positions, and the cumulative lengths of packed sequences."""
    query, mask = local.inputs.query, local.mask
    of_queries, of_keys = call.cu_seqlens
    lengths = shards.queries.length, shards.keys.length
    if of_queries is None:
        return spec_of_mask(mask, query.shape[0], num_heads, *lengths, query.device), None
    of_keys = of_queries if of_keys is None else of_keys
    starts = of_queries.tolist(), of_keys.tolist()
    longest = [max((b - a for a, b in itertools.pairwise(s)), default=0) for s in starts]
    row = query.new_empty(1, num_heads, 1)
    rows = [row.expand(length, -1, -1) for length in lengths]  # stand-ins for all ranks' rows
    spec = packed_spec(
        rows[0], rows[1], of_queries, of_keys, longest[0], longest[1], mask, call.is_causal
    )
    return spec, starts
