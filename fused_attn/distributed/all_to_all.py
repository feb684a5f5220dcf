"""All-to-all attention: each rank computes some of the heads for all positions.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of
Extreme Long Sequence Transformer Models".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import problem_of, select
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.distributed.ranks import Ranks
from fused_attn.distributed.sharding import Sharding, attention_offsets
from fused_attn.masks.spec import MaskSpec
from fused_attn.ops import dispatch


def attend_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskSpec,
    options: AttentionOptions,
    heads: tuple[int, int],
    named: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out and lse for a subset of the heads of a call, over all positions.

    Args:
        query, key, value: (batch, heads, positions, dim).
        mask: mask of these heads.
        heads: (first head, number of heads of the complete call), for dropout.
        named: name of the backend that the caller requested, or None.
    """
    if options.dropout_p > 0.0:
        packed = mask.cu_seqlens_q
        offsets = attention_offsets(
            query.shape[0] if packed is None else len(packed) - 1,
            head0=heads[0],
            num_heads_global=heads[1],
            device=query.device,
        )
        options = replace(options, dropout_offsets=offsets)
    call = AttentionCall(query, key, value, mask, options)
    backend = select(problem_of(call, "lse"), named)
    out, lse = dispatch.run_attention(call, backend, True)
    assert lse is not None
    return out, lse


class HeadExchange:
    """All-to-all exchange from some rows of all heads to all rows of some heads, and back.

    Each rank receives consecutive query heads and the KV heads that they use. If they use several
    KV heads, and another rank uses one of these, it receives one KV head per query head.

    Attributes:
        heads: the query heads of this rank.

    Args:
        ranks: the ranks that exchange heads.
        queries, keys: the positions of each rank, for all ranks of the mesh.
        rank: index of this rank in the whole mesh.
        num_heads, num_heads_kv: numbers of heads of the complete call.

    Raises:
        ValueError: there are fewer query heads than ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        queries: Sharding,
        keys: Sharding,
        rank: int,
        num_heads: int,
        num_heads_kv: int,
    ) -> None:
        size = ranks.size
        if num_heads < size:
            raise ValueError(
                f"query must have at least {size} heads (one for each rank of the mesh), "
                f"got {num_heads}: use ring_attention"
            )
        ends = [num_heads * r // size for r in range(size + 1)]
        self._ranks = ranks
        self._heads = [range(a, b) for a, b in itertools.pairwise(ends)]
        self._heads_kv = [_kv_heads(own, num_heads // max(num_heads_kv, 1)) for own in self._heads]
        self.heads = self._heads[ranks.rank]
        first = rank - ranks.rank  # first rank of the group in the whole mesh
        group = range(first, first + size)
        self._queries = _Order(queries, group)
        self._keys = self._queries if keys is queries else _Order(keys, group)

    def gathered(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows of this rank's heads, in ascending order of position."""
        q, k = self._queries, self._keys
        return (
            q.ascending(self._to_heads(query, self._heads, q.rows)),
            k.ascending(self._to_heads(key, self._heads_kv, k.rows)),
            k.ascending(self._to_heads(value, self._heads_kv, k.rows)),
        )

    def returned(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of all heads: the inverse of `gathered`."""
        rows = self._queries.rows
        results = []
        for tensor in (out, lse[..., None]):
            tensor = self._queries.by_rank(tensor)
            sent = tensor.split(rows, dim=2)
            shapes = [
                (*tensor.shape[:1], len(own), rows[self._ranks.rank], tensor.shape[3])
                for own in self._heads
            ]
            results.append(torch.cat(_exchanged(self._ranks, sent, shapes), dim=1))
        return results[0], results[1][..., 0]

    def _to_heads(
        self, tensor: Tensor, heads: Sequence[range | list[int]], rows: Sequence[int]
    ) -> Tensor:
        """Send rows of the given heads to each rank; return received rows of this rank's heads."""
        sent = [_of_heads(tensor, own) for own in heads]
        own = len(heads[self._ranks.rank])
        shapes = [(tensor.shape[0], own, count, tensor.shape[3]) for count in rows]
        return torch.cat(_exchanged(self._ranks, sent, shapes), dim=2)


class _Order:
    """Order of the rows of a group of ranks: by rank, and by position.

    Attributes:
        rows: number of rows of each rank of the group.
    """

    def __init__(self, sharding: Sharding, group: range) -> None:
        self.rows = [sharding.rows(rank) for rank in group]
        positions = torch.cat([sharding.positions(rank) for rank in group])
        order = positions.argsort()
        in_order = bool((order.diff() == 1).all())
        self._order = None if in_order else order

    def ascending(self, tensor: Tensor) -> Tensor:
        """Convert dimension 2 from the order by rank to the order by position."""
        order = self._order
        return tensor if order is None else tensor.index_select(2, order.to(tensor.device))

    def by_rank(self, tensor: Tensor) -> Tensor:
        """Convert dimension 2 from the order by position to the order by rank."""
        order = self._order
        if order is None:
            return tensor
        return tensor.index_select(2, order.argsort().to(tensor.device))


def _kv_heads(heads: range, group: int) -> range | list[int]:
    """Return the KV heads of consecutive query heads: one per group of heads, or one per head."""
    first, last = heads.start // group, (heads.stop - 1) // group
    aligned = heads.start % group == 0 and heads.stop % group == 0
    return range(first, last + 1) if aligned or first == last else [h // group for h in heads]


def _of_heads(tensor: Tensor, heads: range | list[int]) -> Tensor:
    if isinstance(heads, range):
        return tensor[:, heads.start : heads.stop]
    return tensor[:, heads]


def _exchanged(
    ranks: Ranks, sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """Send one tensor to each rank, and return those received, which have the given shapes.

    The result is differentiable.
    """
    message = torch.cat([tensor.flatten() for tensor in sent])
    given = [tensor.numel() for tensor in sent]
    taken = [int(torch.Size(shape).numel()) for shape in shapes]
    received = _AllToAll.apply(message, ranks.group, given, taken)
    parts = received.split(taken)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class _AllToAll(Function):
    """Exchange of the parts of a one-dimensional tensor; differentiable to any order."""

    @staticmethod
    def forward(
        ctx: Any, message: Tensor, group: Any, given: list[int], taken: list[int]
    ) -> Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        received = message.new_empty(sum(taken))
        dist.all_to_all_single(received, message.contiguous(), taken, given, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.group, ctx.taken, ctx.given), None, None, None
