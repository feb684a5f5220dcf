"""Random cases of distributed attention, computed by threads in place of processes."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import ring_cases
import torch
import torch.distributed as dist
from fuzz_cases import Case, Masked, attend, attention_cases, check_attention
from fuzz_masks import trees
from hypothesis import strategies as st
from torch import Tensor

from fused_attn import masks
from fused_attn.distributed import Sharding, attention, ring
from fused_attn.distributed.ranks import Ranks, Transfer


class Exchange:
    """Messages between ranks that are threads of this process, in place of a process group."""

    def __init__(self, size: int) -> None:
        self._messages, self._barrier = [None] * size, threading.Barrier(size, timeout=60)
        self.abort = self._barrier.abort

    def share(self, rank: int, message: Any) -> list[Any]:
        """Return the messages of all ranks."""
        self._messages[rank] = message
        self._barrier.wait()
        messages = list(self._messages)
        self._barrier.wait()
        return messages


class ThreadRanks(Ranks):
    """Ranks whose group is an Exchange."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self.group.share(self.rank, tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self.group.share(self.rank, tensor)[0]

    def transfer(self, *, to: int, sent: Tensor, source: int, received: Tensor) -> Transfer:
        """Transfer messages like `start_transfer`; `received` is NaN until wait() is called."""
        target, message = self.group.share(self.rank, (to, sent.clone()))[source % self.size]
        assert target % self.size == self.rank and message.shape == received.shape
        work = SimpleNamespace(wait=lambda: received.copy_(message))
        return Transfer(received.fill_(torch.nan), sent, [work])

    def all_to_all(self, received: Tensor, message: Tensor, taken: Any, given: Any) -> None:
        parts = self.group.share(self.rank, message.split(given))
        received.copy_(torch.cat([of_rank[self.rank] for of_rank in parts]))


class Threads(NamedTuple):
    """Ranks that are threads of this process, with the interface of `Processes`.

    Attributes:
        mesh: shape of the mesh.
        plans: the Plan and the Shards of each rank, once it has made a call.
    """

    mesh: tuple[int, ...]
    plans: dict[int, Any]

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Return the results of all ranks."""
        first, last = self.mesh[0], self.mesh[-1] if len(self.mesh) > 1 else 1
        rings = [Exchange(first) for _ in range(last)]
        heads = [Exchange(last) for _ in range(first)]
        place, plan_of = threading.local(), attention._plan

        def plan(spec: Any, own: Any, shards: Any) -> Any:
            made = plan_of(spec, own, shards)
            self.plans[place.rank] = made, shards
            return made

        def on_rank(rank: int) -> Any:
            i, j = divmod(rank, last)
            groups = ThreadRanks(rings[j], i, first), ThreadRanks(heads[i], j, last)
            place.rank, place.groups = rank, list(groups[: len(self.mesh)])
            try:
                return function(*args)
            except BaseException:
                for exchange in (*rings, *heads):
                    exchange.abort()
                raise

        def all_to_all(*args: Any, group: Exchange) -> None:
            ranks = next(own for own in place.groups if own.group is group)
            ranks.all_to_all(*args)

        with (
            mock.patch.object(attention, "ranks_of", lambda mesh: place.groups),  # noqa: PT008
            mock.patch.object(attention, "_plan", plan),
            mock.patch.object(ring, "start_transfer", ThreadRanks.transfer),
            mock.patch.object(ring_cases, "mesh_of", tuple),
            mock.patch.object(dist, "get_rank", lambda: place.rank),  # noqa: PT008
            mock.patch.object(dist, "all_to_all_single", all_to_all),
            ThreadPoolExecutor(first * last) as pool,
        ):
            done = [pool.submit(on_rank, rank) for rank in range(first * last)]
            errors = [future.exception() for future in done]
        errors = [e for e in errors if e is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in done]


def on_ranks(
    case: Case, at: Masked, lengths: Any, starts: Any, backend: str, query: Tensor, key: Tensor,
    value: Tensor, bias: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out and lse from all ranks, or from eager attention over the complete sequence."""
    extra = {} if bias is None else {"bias": bias}
    if backend == "eager":
        return attend(case, at, lengths, starts, backend, query, key, value, **extra)
    totals = [sum(n) for n in lengths] if lengths else at.visible.shape[2:]
    options = case["options"] | {"is_causal": case["is_causal"], "enable_gqa": True}
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=False))
    shardings = [sharding_of(*own) for own in zip(case["chunks"], totals, strict=True)]
    mask, mesh = masks.as_mask(at.mask), tuple(case["mesh"])
    own = ring_cases.Case(case["method"], mesh, tuple(shardings), mask, **options)
    ranks = Threads(own.mesh, {})
    results = ring_cases.OnRanks.apply(own, ranks, query, key, value, bias)
    if len(ranks.mesh) == 1 and ranks.plans:
        plans = [ranks.plans[rank][0] for rank in range(ranks.mesh[0])]
        begins = [t.tolist() for t in starts] or None
        count = ring_cases.covered(plans, shardings, totals, begins)
        visible = at.visible.flatten(0, 1).any(0)
        if lengths:
            visible = torch.block_diag(
                *(v[:q, :k] for v, q, k in zip(at.visible.any(1), *lengths, strict=True))
            )
        assert count.max() <= 1, "a pair is computed twice"
        assert (count[visible.bool()] == 1).all(), "a visible pair is not computed"
    return results


def sharding_of(chunks: list[list[int]], length: int) -> Sharding:
    """Return the Sharding of chunks (rank, first position); each rank keeps the list's order."""
    begins = sorted({min(begin, length) for _, begin in chunks} | {length})
    runs: list[list[range]] = [[] for _ in range(1 + max(rank for rank, _ in chunks))]
    for rank, begin in chunks:
        if begin < length:
            runs[rank].append(range(begin, begins[begins.index(begin) + 1]))
    return Sharding(runs)


@st.composite
def plan_cases(draw: st.DrawFn, op: str, backend: str, dtype: str) -> Case:
    """Draw a case of attention over sequences that are distributed over ranks."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    case = draw(attention_cases(pick("attention", "varlen"), backend, dtype))
    heads = case["shape"][1]
    mesh = pick([2], [3], [1], [5], *([[2, n] for n in (1, 2) if n <= heads]))
    ranks = mesh[0] * mesh[-1] ** (len(mesh) - 1)
    case |= {"op": op, "mesh": mesh, "sinks": False, "lse": True, "poison": None, "chunks": []}
    case["method"] = pick("ring", "ring", "all_to_all") if heads >= ranks else "ring"
    case["layouts"] = ["plain"] * 3
    totals = case["shape"][3:5]
    if case["lengths"]:  # distributed attention derives the longest sequence from cu_seqlens
        totals, case["shape"][3:5] = zip(*((sum(n), max(n)) for n in case["lengths"]), strict=True)
        case["mask"] = draw(trees((*case["shape"][:2], *case["shape"][3:5])))
    for length in totals:
        chunk = st.tuples(st.integers(0, ranks - 1), st.integers(1, max(1, length - 1)))
        more = draw(st.lists(chunk.map(list), unique_by=lambda c: c[1], max_size=8))
        case["chunks"].append([[ranks - 1, 0], *more])
    text = json.dumps(case["mask"])
    # Prefixes with dropout need runs that begin at multiples of 8. Functions may be prefixes.
    if any(f'"{kind}"' in text for kind in ("prefix", "or", "mod")):
        case["options"]["dropout_p"] = 0.0
    for step in case["steps"]:
        step["rows"] = None
    return case


def check_plan(case: Case, backend: str) -> None:
    """Check distributed attention.

    On meshes of one dimension, check also that the plans cover each visible pair exactly once.
    """
    check_attention(case, backend, call=on_ranks)
