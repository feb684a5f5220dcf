"""Distributed attention as one function of complete tensors, for comparison with one process."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from processes import Processes
from torch import Tensor
from torch.autograd import Function

import fused_attn
from fused_attn import distributed, masks
from fused_attn.distributed import Sharding, ring
from fused_attn.distributed.plan import Plan

SEED = 5


class Case:
    """A call of distributed attention.

    Args:
        method: "ring" or "all_to_all".
        mesh: shape of the mesh.
        shardings: Shardings of queries and of keys.
        mask: mask of the complete sequence, or None.
        options: further keyword arguments of the call.
    """

    def __init__(
        self,
        method: str,
        mesh: tuple[int, ...],
        shardings: tuple[Sharding, Sharding],
        mask: Any = None,
        **options: Any,
    ) -> None:
        self.method, self.mesh, self.shardings = method, mesh, shardings
        self.mask, self.options = mask, options

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.options

    def of(self, ranks: Processes) -> Callable[..., Callable[..., tuple]]:
        """Return function(backend)(query, key, value, bias=None) for `assert_like_eager`.

        The backend "eager" runs in this process, and all others on the ranks.
        """

        def of(backend: str) -> Callable[..., tuple[Tensor, ...]]:
            if backend == "eager":
                return self.in_one_process
            return lambda query, key, value, bias=None: OnRanks.apply(
                self, ranks, query, key, value, bias
            )

        tensors = () if self.mask is None else self.mask.tensors()
        if all(t.untyped_storage().nbytes() < 2**20 for t in tensors):
            of.key = pickle.dumps((self.packed, self.mask, self.options))  # type: ignore[attr-defined]
        return of

    def in_one_process(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return out and lse of eager attention."""
        options = {"return_lse": True, "backend": "eager", **self.options}
        mask = with_bias(self.mask, bias)
        if not self.packed:
            return fused_attn.scaled_dot_product_attention(query, key, value, mask, **options)
        of_queries = options.pop("cu_seqlens_q")
        ends = of_queries, options.pop("cu_seqlens_k", of_queries)
        longest = [int(e.diff().max()) for e in ends]
        options.pop("enable_gqa", None)
        return fused_attn.varlen_attention(query, key, value, *ends, *longest, mask, **options)

    def assembled(self, results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the complete tensors from the results of all ranks."""
        whole = {}
        for name in results[0]:
            parts = [result[name] for result in results]
            if name == "grad_bias":
                whole[name] = torch.stack(parts).double().sum(0).to(parts[0].dtype)
                continue
            sharding = self.shardings[0 if name in ("out", "lse", "grad_query") else 1]
            dim = -1 if name == "lse" else self.row_dim
            order = torch.cat([sharding.positions(rank) for rank in range(sharding.ranks)])
            whole[name] = torch.cat(parts, dim).index_select(dim, order.argsort())
        return whole

    @property
    def row_dim(self) -> int:
        """Index of the sequence dimension in query, key, value and out."""
        return -3 if self.packed else -2


def covered(
    plans: Sequence[Plan],
    shardings: Sequence[Sharding],
    sizes: tuple[int, int],
    starts: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return, for each query and key, how many blocks of the plans of all ranks contain the pair.

    Args:
        sizes: numbers of queries and keys.
        starts: for packed sequences, the first query and the first key of each.
    """
    count = torch.zeros(sizes, dtype=torch.int64)
    for rank, plan in enumerate(plans):
        own = shardings[0].positions(rank)
        for s, step in enumerate(plan.steps):
            peer = (rank - s) % len(plans)
            theirs = shardings[1].positions(peer)
            rows = [i for part in step.wanted for i in part]
            sent = [i for part in plans[peer].steps[s].sent for i in part]
            assert rows == sent, "a rank expects rows other than those sent"
            for block in step.blocks:
                assert [rows[i] for i in block.received] == list(block.keys.rows)
                q, k = own[list(block.queries.rows)], theirs[list(block.keys.rows)]
                count[q[:, None], k] += 1
                offsets = [of[block.queries.sequence] for of in starts] if starts else [0, 0]
                assert (q - offsets[0]).tolist() == list(block.queries.positions)
                assert (k - offsets[1]).tolist() == list(block.keys.positions)
    return count


def with_bias(mask: Any, bias: Tensor | None = None) -> Any:
    if bias is None:
        return mask
    return masks.bias(bias) if mask is None else mask & masks.bias(bias)


class OnRanks(Function):
    """Distributed attention of complete tensors; its backward runs the forward again."""

    @staticmethod
    def forward(
        ctx: Any, case: Case, ranks: Processes, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.case, ctx.ranks = case, ranks
        ctx.save_for_backward(*tensors)
        given = [None if t is None else t.detach() for t in tensors]
        whole = case.assembled(ranks.run(run_on_rank, case, given, None, None))
        return whole["out"], whole["lse"]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        tensors = [None if t is None else t.detach() for t in ctx.saved_tensors]
        results = ctx.ranks.run(run_on_rank, ctx.case, tensors, grad_out, grad_lse)
        whole = ctx.case.assembled(results)
        grads = [whole.get(f"grad_{n}") for n in ("query", "key", "value", "bias")]
        return None, None, *grads


def run_on_rank(
    case: Case, tensors: list, grad_out: Tensor | None, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """Return this rank's rows of out and lse, or its gradients if grad_out is given."""
    rank, dim = dist.get_rank(), case.row_dim
    of_q, of_k = (sharding.positions(rank) for sharding in case.shardings)
    leaves = [t.index_select(dim, i) for t, i in zip(tensors[:3], (of_q, of_k, of_k), strict=True)]
    if tensors[3] is not None:
        leaves.append(tensors[3].clone())
    for leaf in leaves:
        leaf.requires_grad_(grad_out is not None)
    function = getattr(distributed, f"{case.method}_attention")
    mask = with_bias(case.mask, *leaves[3:])
    out, lse = function(
        *leaves[:3], mask, positions=case.shardings, mesh=mesh_of(case.mesh), return_lse=True,
        **case.options,
    )  # fmt: skip
    if grad_out is None:
        return {"out": out, "lse": lse}
    given = grad_out.index_select(dim, of_q), grad_lse.index_select(-1, of_q)
    grads = torch.autograd.grad((out, lse), leaves, given, allow_unused=True)
    return {f"grad_{n}": g for n, g in zip(("query", "key", "value", "bias"), grads, strict=False)}


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """Return a mesh of all ranks; each mesh is created once."""
    return dist.init_device_mesh("cpu", shape)


def run_both_on_rank(cases: list[Case], tensors: list) -> list[dict[str, Any]]:
    """Return the results of cases whose masks share tensors, like the layers of a model."""
    return [{"rank": dist.get_rank(), **run_on_rank(case, tensors, None, None)} for case in cases]


def second_derivative() -> str:
    """Return the error message for a second derivative whose output gradient has no history."""
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = distributed.ring_attention(query, query, query)
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    try:
        grad.square().sum().backward()
    except NotImplementedError as error:
        return str(error)
    return ""


def cross_attention(method: str, mesh: tuple[int, ...]) -> None:
    """Assert that cross-attention is correct if only some ranks have as many queries as keys."""
    torch.manual_seed(0)
    rows_q, rows_k = [4, 6, 0, 3], [4, 8, 5, 3]
    tensors = [torch.randn(1, 4, sum(rows), 8) for rows in (rows_q, rows_k, rows_k)]
    tensors.append(fused_attn.scaled_dot_product_attention(*tensors))
    *of_rank, expected = (
        t.split(rows, 2)[dist.get_rank()]
        for t, rows in zip(tensors, (rows_q, rows_k, rows_k, rows_q), strict=True)
    )
    out = getattr(distributed, f"{method}_attention")(*of_rank, mesh=mesh_of(mesh))
    torch.testing.assert_close(out, expected)


def run_ahead(ahead: int, *args: Any) -> dict[str, Tensor]:
    """Return `run_on_rank(*args)`, where each rank receives keys up to `ahead` steps in advance."""
    with mock.patch.object(ring, "AHEAD", ahead):
        return run_on_rank(*args)


def positions_as_tensors(method: str, mesh: tuple[int, ...], shardings: tuple) -> None:
    """Assert that positions given as tensors give the same results as Shardings."""
    rows = tuple(sharding.positions(dist.get_rank()) for sharding in shardings)
    query, key = (torch.randn(1, 4, len(positions), 8) for positions in rows)
    function = getattr(distributed, f"{method}_attention")
    as_tensors = rows[0] if shardings[0] == shardings[1] else rows
    for mask in (masks.causal(), None):
        results = [
            function(query, key, key, mask, positions=positions, mesh=mesh_of(mesh))
            for positions in (shardings, as_tensors)
        ]
        assert torch.equal(*results)


def decode_on_rank(
    tensors: dict[str, Tensor], lengths: list[int], sharding: Sharding, steps: tuple[int, ...],
    mask: Any, options: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
    """Return out and lse of each decoding step, and this rank's key cache after the last step.

    Args:
        tensors: query, key and value of all steps, and the filled caches.
        lengths: cached positions before the first step.
        steps: number of new positions in each step.
    """
    positions = sharding.positions(dist.get_rank())
    caches = [tensors[f"{n}_cache"].index_select(2, positions) for n in ("key", "value")]
    total, outs, lses = torch.tensor(lengths), [], []
    parts = zip(*(tensors[n].split(steps, 2) for n in ("query", "key", "value")), strict=True)
    for query, key, value in parts:
        out, lse = distributed.decode_attention(
            query, *caches, cache_lengths=total, positions=sharding,
            mesh=mesh_of((dist.get_world_size(),)), key=key, value=value, attn_mask=mask,
            return_lse=True, **options,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
        total = total + key.shape[2]
    return outs, lses, caches[0]
