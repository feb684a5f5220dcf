"""Attention over sequences whose positions are distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fused_attn.base.torch_state import transformed
from fused_attn.call.attention import AttentionOptions
from fused_attn.distributed.all_to_all import HeadExchange, attend_to_all
from fused_attn.distributed.arguments import (
    Arguments,
    Method,
    Positions,
    Prepared,
    Shards,
    prepared,
)
from fused_attn.distributed.plan import Plan, plan_of
from fused_attn.distributed.ranks import Mesh, Ranks, ranks_of
from fused_attn.distributed.ring import Ring, ring
from fused_attn.distributed.visible_keys import VisibleKeys
from fused_attn.masks import Mask
from fused_attn.masks.memo import Memo, recall, recall_on_tensor
from fused_attn.masks.restrict import of_heads
from fused_attn.masks.spec import BOUNDS, MaskSpec
from fused_attn.ops.seeds import new_seed

T = TypeVar("T")


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
    that their queries attend to. All masks are supported.

    All ranks must make the same calls in the same order. Each call begins with a message of a
    constant size, with which the ranks compare their arguments. The gradient of a learned bias is
    that of this rank's queries; sum it over the ranks, as for any other parameter. Second
    derivatives are not supported.

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
            gives the positions of queries and of keys; otherwise they are the same. With a
            Sharding, the positions need not be exchanged in each call.
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
    call = Arguments(
        query, key, value, attn_mask, is_causal, enable_gqa, positions, options,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k), method="ring",
    )  # fmt: skip
    out, lse = attend(call, ranks_of(mesh))
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

    Unlike in ring_attention, each rank computes some of the heads for all positions. It exchanges
    its rows of all heads for all rows of these heads before attention, and back after it.

    Args:
        query: as in ring_attention. num_heads must be at least the number of ranks. If there are
            fewer KV heads than ranks, each KV head is sent to several ranks.
        mesh: as in ring_attention, but a one-dimensional mesh uses this function.

    The other arguments, results and errors are those of ring_attention.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    call = Arguments(
        query, key, value, attn_mask, is_causal, enable_gqa, positions, options,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k), method="all_to_all",
    )  # fmt: skip
    out, lse = attend(call, ranks_of(mesh))
    return (out, lse) if return_lse else out


@torch.compiler.disable(recursive=True, reason="distributed attention runs eagerly")
def attend(call: Arguments, groups: list[Ranks]) -> tuple[Tensor, Tensor]:
    """Return out and lse of the rows of this rank; see `ring_attention`.

    Args:
        groups: the ranks of each dimension of the mesh. Ranks of the first dimension exchange keys
            and values, those of the last exchange heads; with one dimension, call.method decides.

    Raises:
        NotImplementedError: under torch.func transforms or forward-mode AD.
    """
    if transformed():
        raise NotImplementedError(
            "distributed attention does not support torch.func transforms or forward-mode AD"
        )
    own = prepared(call, groups)
    query, key, value, _, leading = own.inputs
    first, total = own.heads
    options = with_seed(own.options, groups, query.device)
    ring_ranks, head_ranks = _roles(groups, call.method, own)
    exchange, spec, shards = None, own.spec, own.shards
    if head_ranks is not None:
        heads = query.shape[1], key.shape[1]
        exchange = HeadExchange(head_ranks, shards.queries, shards.keys, shards.rank, *heads)
        query, key, value = exchange.gathered(query, key, value)
        spec = of_heads(spec, slice(exchange.heads.start, exchange.heads.stop))
        first += exchange.heads.start
        shards = shards.merged(head_ranks.size)
    if ring_ranks is None:
        tensors = query, key, value
        out, lse = attend_to_all(*tensors, spec, options, (first, total), call.backend)
    else:
        plan = _plan(spec, own, shards)
        setting = Ring(ring_ranks, plan, options, (first, total), call.backend)
        out, lse = ring(query, key, value, spec, setting)
    if exchange is not None:
        out, lse = exchange.returned(out, lse)
    if own.starts is not None:  # the sequences are packed
        return out[0].transpose(0, 1), lse[0]
    if len(leading) != 3:
        out, lse = out.reshape(*leading, out.shape[-1]), lse.reshape(leading)
    return out, lse


def _roles(groups: list[Ranks], method: Method, own: Prepared) -> tuple[Ranks | None, Ranks | None]:
    """Return the ranks that exchange keys and values, and those that exchange heads."""
    if len(groups) > 1:
        return groups[0], groups[1]
    query, key = own.inputs[:2]
    size, num_heads, num_heads_kv = groups[0].size, query.shape[1], key.shape[1]
    if method == "auto" and num_heads >= size:
        # Compare the rows of one head that a rank receives in a forward. All-to-all: query, key,
        # value and out. Ring: approximately the keys and values that a query attends to.
        rows = own.shards.queries.length / size * (1 - 1 / size)
        by_heads = (2 * num_heads + 2 * max(num_heads_kv, size)) * rows / size
        visible = _cached_on_mask(
            own.spec, ("mean work", *own.shape), query.device,
            lambda: VisibleKeys(own.spec, own.shape).mean_work,
        )  # fmt: skip
        by_keys = 2 * num_heads_kv * visible
        method = "all_to_all" if by_heads < by_keys else "ring"
    return (None, groups[0]) if method == "all_to_all" else (groups[0], None)


def with_seed(
    options: AttentionOptions, groups: Sequence[Ranks], device: torch.device
) -> AttentionOptions:
    """Return the options with the seed of the first rank of all groups, if there is dropout.

    A seed that is a tensor is not compared, because reading it would wait for a GPU.
    """
    if options.dropout_p == 0.0:
        return options
    seed = new_seed(device) if options.seed is None else options.seed.clone()
    for ranks in groups:
        seed = ranks.broadcast(seed)
    return replace(options, seed=seed)


def _plan(spec: MaskSpec, own: Prepared, shards: Shards) -> Plan:
    """Return the plan of this rank, which is cached on the mask.

    Args:
        spec: mask of the heads that this rank computes.
        shards: the positions of each rank, for the ranks that exchange keys and values.
    """
    rank, dropout = shards.rank, own.options.dropout_p > 0.0
    packed = None if own.starts is None else tuple(map(tuple, own.starts))

    def make() -> Plan:
        bounds = spec.bounds
        prefix = bounds is not None and bool((bounds[:, BOUNDS.index("prefix_end")] > 0).any())
        return plan_of(
            shards.queries, shards.keys, rank, VisibleKeys(spec, own.shape),
            starts=own.starts, prefix=prefix, dropout=dropout,
        )  # fmt: skip

    memo_key = ("ring", shards.queries, shards.keys, rank, dropout, packed, *own.shape)
    return _cached_on_mask(spec, memo_key, own.inputs.query.device, make)


_LIMIT = 64  # cached values per mask with tensors, and in total for masks without tensors
_of_numbers: Memo = {}


def _cached_on_mask(
    spec: MaskSpec, memo_key: Hashable, device: torch.device, make: Callable[[], T]
) -> T:
    """Return make(), or its cached result for the same mask and the same `memo_key`.

    Two masks are the same if their numbers are equal and their tensors, except bias, are unchanged;
    see `masks.memo.recall`. Values must not depend on the bias. Caching only saves time: it must
    not affect whether ranks communicate.

    Args:
        memo_key: everything else that the value depends on.
        device: device of the call.
    """
    named = {
        name: tensor
        for name, tensor in zip(spec.TENSORS, spec.tensors(), strict=True)
        if tensor is not None and name != "bias" and not name.endswith("_summary")
    }
    numbers = tuple(value for value in spec.flat() if isinstance(value, (int, float)))
    key, tensors = (memo_key, numbers, *named), list(named.values())
    if tensors:
        return recall_on_tensor(tensors[0], key, tensors, make, _LIMIT)
    return recall(_of_numbers, key, (), device, make, _LIMIT)
