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
        options: further keyword arguments.
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

        The backend "eager" computes in this process; with all others, the ranks compute.
        """

        def of(backend: str) -> Callable[..., tuple[Tensor, ...]]:
            if backend == "eager":
                return self.in_one_process
            return lambda query, key, value, bias=None: OnRanks.apply(
                self, ranks, query, key, value, bias
            )

        if self.mask is None or all(
            t.untyped_storage().nbytes() < 2**20 for t in self.mask.tensors()
        ):
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
                whole[name] = torch.stack([p.double() for p in parts]).sum(0).to(parts[0].dtype)
                continue
            sharding = self.shardings[0 if name in ("out", "lse", "grad_query") else 1]
            dim = self.row_dim + (1 if name == "lse" and not self.packed else 0)
            dim = -1 if name == "lse" else dim
            order = torch.cat([sharding.positions(rank) for rank in range(sharding.ranks)])
            whole[name] = torch.cat(parts, dim=dim).index_select(dim, order.argsort())
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
    """For each pair of a query and a key, count the blocks on all ranks that cover it."""
    count = torch.zeros(sizes, dtype=torch.int64)
    ranks = len(plans)
    for rank, plan in enumerate(plans):
        own = shardings[0].positions(rank)
        for s, step in enumerate(plan.steps):
            peer = (rank - s) % ranks
            theirs = shardings[1].positions(peer)
            rows = [i for part in step.wanted for i in part]
            sent = [i for part in plans[peer].steps[s].sent for i in part]
            assert rows == sent, "a rank expects other rows than its peer sends"
            for block in step.blocks:
                assert [rows[i] for i in block.received] == list(block.keys.rows)
                q, k = own[list(block.queries.rows)], theirs[list(block.keys.rows)]
                count[q[:, None], k] += 1
                offsets = [0, 0]
                if starts is not None:
                    offsets = [of[block.queries.sequence] for of in starts]
                assert (q - offsets[0]).tolist() == list(block.queries.positions)
                assert (k - offsets[1]).tolist() == list(block.keys.positions)
    return count


def with_bias(mask: Any, bias: Tensor | None) -> Any:
    if bias is None:
        return mask
    return masks.bias(bias) if mask is None else mask & masks.bias(bias)


class OnRanks(Function):
    """Distributed attention of complete tensors; its backward repeats the forward on the ranks."""

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
    positions = [sharding.positions(rank) for sharding in case.shardings]
    at = positions[0], positions[1], positions[1]
    backward = grad_out is not None
    leaves = [
        t.index_select(dim, rows).requires_grad_(backward)
        for t, rows in zip(tensors[:3], at, strict=True)
    ]
    bias = None if tensors[3] is None else tensors[3].clone().requires_grad_(backward)
    function = getattr(distributed, f"{case.method}_attention")
    out, lse = function(
        *leaves,
        with_bias(case.mask, bias),
        positions=case.shardings,
        mesh=mesh_of(case.mesh),
        return_lse=True,
        **case.options,
    )
    if grad_out is None:
        return {"out": out, "lse": lse}
    given = grad_out.index_select(dim, positions[0]), grad_lse.index_select(-1, positions[0])
    grads = torch.autograd.grad(
        (out, lse), [*leaves, *([] if bias is None else [bias])], given, allow_unused=True
    )
    return {f"grad_{n}": g for n, g in zip(("query", "key", "value", "bias"), grads, strict=False)}


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """Return a mesh of all ranks; each mesh is created once."""
    return dist.init_device_mesh("cpu", shape)


def run_both_on_rank(cases: list[Case], tensors: list) -> list[dict[str, Any]]:
    """Return the results of cases whose masks share tensors, as they do in a model."""
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
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    rows_q, rows_k = [4, 6, 0, 3], [4, 8, 5, 3]
    query = torch.randn(1, 4, sum(rows_q), 8, generator=generator)
    key, value = torch.randn(2, 1, 4, sum(rows_k), 8, generator=generator)
    function = getattr(distributed, f"{method}_attention")
    of_rank = query.split(rows_q, 2)[rank], key.split(rows_k, 2)[rank], value.split(rows_k, 2)[rank]
    out = function(*of_rank, mesh=mesh_of(mesh))
    expected = fused_attn.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, expected.split(rows_q, 2)[rank])


def run_ahead(ahead: int, *args: Any) -> dict[str, Tensor]:
    """Return `run_on_rank(*args)` with the keys of `ahead` steps in flight."""
    with mock.patch.object(ring, "AHEAD", ahead):
        return run_on_rank(*args)


def positions_as_tensors(method: str, mesh: tuple[int, ...], shardings: tuple) -> None:
    """Assert that positions given as tensors give the same results as Shardings."""
    rank = dist.get_rank()
    rows = [sharding.positions(rank) for sharding in shardings]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, shardings[0].length, 8, generator=generator)[:, :, rows[0]]
    key = torch.randn(1, 4, shardings[1].length, 8, generator=generator)[:, :, rows[1]]
    function = getattr(distributed, f"{method}_attention")
    same = shardings[0] == shardings[1]
    for mask in (masks.causal(), None):
        results = [
            function(query, key, key, mask, positions=positions, mesh=mesh_of(mesh))
            for positions in (shardings, rows[0] if same else tuple(rows))
        ]
        assert torch.equal(*results)
