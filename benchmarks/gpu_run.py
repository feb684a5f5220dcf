"""Checks, measures and records one problem at a time."""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_measure
import gpu_ways
import torch
from gpu_shapes import aims, flops, visible_pairs, visible_tiles
from gpu_ways import COMPILING, OURS, Way
from shapes import Attention
from torch import Tensor

from fused_attn.tools.contract import results_of

BACKWARD_FLOPS = 2.5  # times those of the forward: five matrix products instead of two
_ROTATED_BYTES, _MAX_SETS = 160 << 20, 4  # operands of this size leave nothing in a cache of 50 MB
Check = Callable[[], Callable[[Any], bool] | None]  # raises, or returns what peers are held to


@dataclass
class Runner:
    """The session's records.

    Attributes:
        timer, host_timer, memory: as in gpu_measure.
        seconds: of the session; after half of it no peer is compiled.
        path: where the records go after each case; None: nowhere.
    """

    device: torch.device
    backend: str
    ceilings: dict[str, float]
    machine: dict[str, Any]
    seconds: float = math.inf
    path: Path | None = None
    timer: Callable[..., dict[str, float]] = gpu_measure.medians
    host_timer: Callable[..., dict[str, float]] = gpu_measure.host_medians
    memory: Callable[..., int | None] = gpu_measure.peak_memory
    quick: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    _unmasked: dict[Any, float] = field(default_factory=dict)

    def spent(self) -> float:
        """The share of the session's time that is gone."""
        return (time.monotonic() - self.begin) / self.seconds

    def run(
        self,
        group: str,
        shape: Any,
        dtype: torch.dtype,
        own: Way,
        peers: dict[str, Callable[[], Way]],
        sets: Sequence[Sequence[Tensor]],
        check: Check,
        *,
        work: dict[str, float],
        timer: Callable[..., dict[str, float]] | None = None,
    ) -> None:
        """Measures ours and the peers, once ours is right.

        Args:
            sets: operands; with gradients where these require them, which is a backward then.
            work: "flops" or "bytes" of a call, and "tile_flops" of its visible tiles.
        """
        record: dict[str, Any] = {
            "group": group, "name": shape.name, "dtype": str(dtype).removeprefix("torch."),
            "source": shape.source,
        }  # fmt: skip
        self.records.append(record)
        backward = any(t.requires_grad for t in sets[0])
        torch.compiler.reset()  # or torch gives up compiling after a few problems
        try:
            agrees = check()
            record["check"] = "passed"
            calls, record["first_call_seconds"] = {}, {}
            with torch.set_grad_enabled(backward):
                calls[OURS] = self._prepared(OURS, own, sets, record)
        except Exception as error:
            record["check"] = f"FAILED: {_reason(error)}"
            self._write()
            raise
        with torch.set_grad_enabled(backward):  # compiled peers are compiled for one of the two
            record["not_available"] = self._add_peers(calls, peers, sets, record, agrees)
            self._note(record, shape, (timer or self.timer)(calls), work)
            record["memory"] = {name: self.memory(each[0]) for name, each in calls.items()}
        self._write()

    def _add_peers(
        self,
        calls: dict[str, list[Callable[[], Any]]],
        peers: dict[str, Callable[[], Way]],
        sets: Sequence[Sequence[Tensor]],
        record: dict[str, Any],
        agrees: Callable[[Any], bool] | None,
    ) -> dict[str, str]:
        """Why each peer that is not among the calls now is not."""
        reasons = {}
        for name, make in peers.items():
            if name in COMPILING and (self.quick or self.spent() > 0.5):
                reasons[name] = "left out to save time"
                continue
            try:
                calls[name] = self._prepared(name, make(), sets, record, agrees)
            except Exception as error:  # whatever a peer has against it
                reasons[name] = _reason(error)
        return reasons

    def _prepared(
        self,
        name: str,
        way: Way,
        sets: Sequence[Sequence[Tensor]],
        record: dict[str, Any],
        agrees: Callable[[Any], bool] | None = None,
    ) -> list[Callable[[], Any]]:
        """The call on each set, made once."""
        start = time.perf_counter()
        calls: list[Callable[[], Any]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why torch does not take a kernel
            for i, operands in enumerate(sets):
                outs = way(*operands)
                if i == 0 and agrees is not None and not agrees(outs):
                    raise ValueError("computes something else: 10 times as far off as eager")
                backward = torch.is_grad_enabled()
                calls.append(_backward(outs, operands) if backward else _forward(way, operands))
                calls[-1]()
                if i == 0:
                    self._synchronize()
                    record["first_call_seconds"][name] = round(time.perf_counter() - start, 2)
        return calls

    def _note(
        self, record: dict[str, Any], shape: Any, seconds: dict[str, float], work: dict[str, float]
    ) -> None:
        """What the times mean."""
        ours = seconds[OURS]
        others = {name: s for name, s in seconds.items() if not name.startswith(OURS)}
        record["milliseconds"] = {name: round(1e3 * s, 5) for name, s in seconds.items()}
        record["speedup"] = {name: round(s / ours, 3) for name, s in others.items()}
        if "flops" in work:
            record["teraflops"] = round(work["flops"] / ours / 1e12, 1)
            record["share_of_matmul"] = round(work["flops"] / ours / self.ceilings["matmul"], 3)
        if "bytes" in work:
            record["gigabytes_a_second"] = round(work["bytes"] / ours / 1e9, 1)
            record["share_of_copy"] = round(work["bytes"] / ours / self.ceilings["copy"], 3)
        if "tile_flops" in work:
            rate = work["tile_flops"] / ours
            record["share_of_unmasked"] = round(rate / self._unmasked_rate(record, shape), 3)
        if "sdpa" in others:
            record["times_sdpa"] = record["speedup"]["sdpa"]
        record["aims"] = {
            name: {"wanted": wanted, "met": record[name] >= wanted}
            for name, wanted in aims(record["group"], shape).items()
        }

    def _unmasked_rate(self, record: dict[str, Any], shape: Attention) -> float:
        """FLOP/s of ours where the same operands see everything."""
        dtype = getattr(torch, record["dtype"])
        backward = record["group"] == "backward"
        shape = replace(shape, mask="none", name="", quick=False)
        key = (shape, dtype, backward)
        if key not in self._unmasked:
            own = gpu_ways.attention(shape, self.backend, self.device)
            sets = [[t.requires_grad_(backward) for t in shape.operands(dtype, self.device)]]
            calls = self._prepared(OURS, own, sets, {"first_call_seconds": {}})
            work = flops(shape) * (BACKWARD_FLOPS if backward else 1.0)
            self._unmasked[key] = work / self.timer({OURS: calls})[OURS]
        return self._unmasked[key]

    def work(self, shape: Attention, backward: bool) -> dict[str, float]:
        """FLOPs of what is visible, by pairs and by tiles."""
        whole = flops(shape) * (BACKWARD_FLOPS if backward else 1.0)
        work = {"flops": whole * visible_pairs(shape, self.device)}
        if shape.mask != "none":
            work["tile_flops"] = whole * visible_tiles(shape, self.device)
        return work

    def sets(self, make: Callable[[int], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """make(seed), as often as it takes for operands to leave the caches between calls."""
        sets = [make(0)]
        size = sum(t.nbytes for t in sets[0])
        wanted = min(_MAX_SETS, -(-_ROTATED_BYTES // size))
        return sets + [make(seed) for seed in range(1, wanted)]

    def results(self) -> dict[str, Any]:
        """Everything, as it is written."""
        return {
            "backend": self.backend,
            "machine": self.machine,
            "ceilings": {name: round(value / 1e9, 1) for name, value in self.ceilings.items()},
            "records": self.records,
        }

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _write(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.path is None:
            return
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.results(), indent=1) + "\n")


def slug(name: str) -> str:
    """A GPU's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _forward(way: Way, operands: Sequence[Tensor]) -> Callable[[], Any]:
    return lambda: way(*operands)


def _backward(results: Any, operands: Sequence[Tensor]) -> Callable[[], Any]:
    outs = results_of(results)
    grads = [torch.randn_like(out) for out in outs]
    return lambda: torch.autograd.grad(outs, operands, grads, retain_graph=True)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]
