"""Runner of the benchmarks, which checks, measures and records one problem at a time."""

from __future__ import annotations

import copy
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from measure import Calls, Meter
from shapes import Attention, aims
from torch import Tensor
from torch.nn import Module
from ways import COMPILING, OURS, Apart, Peers, Way, attention

from fused_attn.tools import contract, timing

FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # a backward has 5 matmuls, a forward 2
_ROTATED_BYTES, _MAX_SETS = 160 << 20, 4  # cycling through this size evicts a 50 MB cache
Check = Callable[[], Callable[[Any], bool] | None]  # raises, or returns a check for peers


@dataclass
class Runner:
    """Runner of the measurements of a session, which stores their records.

    Attributes:
        backend: fused_attn backend; None for the default choice.
        gpu: compare with the GPU peers, and rotate sets of operands.
        seconds: time limit of the session. After half of it, peers that compile are skipped.
        path: file to which all records are written after each case; None for no file.
        quick: skip peers that take long.
        show: callback that receives each record and the call of fused_attn.
    """

    meter: Meter
    device: torch.device
    backend: str | None
    ceilings: dict[str, float]
    machine: dict[str, Any]
    gpu: bool = False
    seconds: float = math.inf
    path: Path | None = None
    quick: bool = False
    show: Callable[[dict[str, Any], Callable[[], Any]], None] = lambda record, call: None
    records: list[dict[str, Any]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    _unmasked: dict[Any, float] = field(default_factory=dict)

    def spent(self) -> float:
        """Return the elapsed fraction of the session's time limit."""
        return (time.monotonic() - self.begin) / self.seconds

    def run(
        self,
        group: str,
        shape: Any,
        dtype: torch.dtype,
        own: Way,
        peers: Peers,
        sets: Sequence[Sequence[Tensor]],
        check: Check,
        *,
        work: dict[str, float],
        passes: str = "forward",
        of_host: bool = False,
    ) -> None:
        """Check fused_attn, then measure fused_attn and its peers, and store a record.

        Args:
            sets: operand sets. The operands require grad unless passes is "forward".
            check: checks fused_attn; see `checked`.
            work: "flops" or "bytes" of a call, and "tile_flops" of its visible tiles.
            passes: "forward", "backward" or "both".
            of_host: measure the host time of a call instead of the device time.
        """
        record = self._begun(group, shape, dtype)
        if not self.quick and peers.keys() & set(COMPILING):
            torch.compiler.reset()  # avoids torch's limit on recompilations
        calls: dict[str, Calls] = {}
        with torch.set_grad_enabled(passes != "forward"):  # peers compile for this grad mode
            try:
                agrees = check()
                record["check"] = "passed"
                record["first_call_seconds"] = {}
                calls[OURS] = self._prepared(OURS, own, sets, passes, record)
            except Exception as error:
                record["check"] = f"FAILED: {_reason(error)}"
                self._write()
                raise
            record["not_available"] = self._add_peers(calls, peers, sets, passes, record, agrees)
            self._measure(record, shape, calls, work, of_host)

    def time(
        self, group: str, shape: Any, dtype: torch.dtype, ways: dict[str, Callable[[], Any]]
    ) -> None:
        """Measure calls that take no operands and that were checked by the caller."""
        record = self._begun(group, shape, dtype)
        record["check"] = "passed"
        calls = {name: [way] for name, way in ways.items() if not (self.quick and name == "eager")}
        self._measure(record, shape, calls, {}, False)

    def _begun(self, group: str, shape: Any, dtype: torch.dtype) -> dict[str, Any]:
        record = {
            "group": group, "name": shape.name, "dtype": str(dtype).removeprefix("torch."),
            "source": shape.source,
        }  # fmt: skip
        if isinstance(shape, Attention):
            record["layout"] = shape.layout
        if self.gpu:
            mask = getattr(shape, "mask", "none").partition(":")[0]
            record |= {"backend": self.backend, "mask": mask}
        self.records.append(record)
        return record

    def _measure(
        self,
        record: dict[str, Any],
        shape: Any,
        calls: dict[str, Calls],
        work: dict[str, float],
        of_host: bool,
    ) -> None:
        timer = self.meter.host_seconds if of_host else self.meter.seconds
        self._note(record, shape, timer(calls), work)
        record["memory"] = {name: self.meter.memory(each[0]) for name, each in calls.items()}
        self._write()
        self.show(record, calls[OURS][0])

    def _add_peers(
        self,
        calls: dict[str, Calls],
        peers: Peers,
        sets: Sequence[Sequence[Tensor]],
        passes: str,
        record: dict[str, Any],
        agrees: Callable[[Any], bool] | None,
    ) -> dict[str, str]:
        """Add the peers' calls to `calls`; return the reason for each peer that is missing."""
        reasons = {}
        for name, make in peers.items():
            compiles = name in COMPILING
            if (self.quick and (compiles or name == "eager")) or (compiles and self.spent() > 0.5):
                reasons[name] = "left out to save time"
                continue
            try:
                calls[name] = self._prepared(name, make(), sets, passes, record, agrees)
            except Exception as error:  # the peer does not support the problem
                reasons[name] = _reason(error)
        return reasons

    def _prepared(
        self,
        name: str,
        way: Way | Apart,
        sets: Sequence[Sequence[Tensor]],
        passes: str,
        record: dict[str, Any],
        agrees: Callable[[Any], bool] | None = None,
    ) -> Calls:
        """Return one callable per operand set, each of which has run once as warm-up."""
        if isinstance(way, Apart):
            way, sets, agrees = way.way, [way.operands], None
        start = time.perf_counter()
        calls: list[Callable[[], Any]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns why it rejects a kernel
            for i, operands in enumerate(sets):
                outs = way(*operands)
                if i == 0 and agrees is not None and not agrees(outs):
                    raise ValueError("computes something else: 10 times as far off as eager")
                calls.append(timing.timed(way, operands, passes, outs))
                if i == 0:
                    self._synchronize()
                    record["first_call_seconds"][name] = round(time.perf_counter() - start, 2)
        return calls

    def _note(
        self, record: dict[str, Any], shape: Any, seconds: dict[str, float], work: dict[str, float]
    ) -> None:
        """Add times, speedups, rates and fractions of peak rates to a record."""
        ours = seconds[OURS]
        others = {name: s for name, s in seconds.items() if not name.startswith(OURS)}
        record["milliseconds"] = {name: round(1e3 * s, 5) for name, s in seconds.items()}
        record["speedup"] = {name: round(s / ours, 3) for name, s in others.items()}
        if "flops" in work:
            rate = work["flops"] / ours
            record["gflops"] = round(rate / 1e9, 1)
            record["share_of_peak"] = round(
                rate / self.ceilings[self.meter.peak(record["dtype"])], 3
            )
        if "bytes" in work:
            record["gigabytes_a_second"] = round(work["bytes"] / ours / 1e9, 1)
            for name in {"copy", "read"} & self.ceilings.keys():
                record[f"share_of_{name}"] = round(work["bytes"] / ours / self.ceilings[name], 3)
        if "tile_flops" in work:
            rate = work["tile_flops"] / ours
            record["share_of_unmasked"] = round(rate / self._unmasked_rate(record, shape), 3)
        if "sdpa" in others:
            record["times_sdpa"] = record["speedup"]["sdpa"]
        if self.gpu:
            record["aims"] = {
                name: {"wanted": wanted, "met": record[name] >= wanted}
                for name, wanted in aims(record["group"], shape).items()
            }

    def _unmasked_rate(self, record: dict[str, Any], shape: Attention) -> float:
        """Return the FLOP/s of fused_attn on the same operands without a mask, cached."""
        dtype, passes = getattr(torch, record["dtype"]), record["group"]
        shape = replace(shape, mask="none", bias=False, name="", quick=False)
        key = (shape, dtype, passes)
        if key not in self._unmasked:
            own = attention(shape, self.backend, self.device)
            operands = shape.operands(dtype, self.device)
            sets = [[t.requires_grad_(passes != "forward") for t in operands]]
            calls = self._prepared(OURS, own, sets, passes, {"first_call_seconds": {}})
            seconds = self.meter.seconds({OURS: calls})[OURS]
            self._unmasked[key] = FLOPS[passes] * shape.flops() / seconds
        return self._unmasked[key]

    def work(self, shape: Attention, passes: str) -> dict[str, float]:
        """Return the FLOPs of visible query-key pairs and, for GPU masks, of visible tiles."""
        whole = FLOPS[passes] * shape.flops()
        work = {"flops": whole * shape.visible_pairs(self.device)}
        if self.gpu and shape.masked:
            work["tile_flops"] = whole * shape.visible_tiles(self.device)
        return work

    def sets(self, make: Callable[[int], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Return a list of operand sets, made by make(seed).

        A CPU uses only make(0). A GPU uses enough sets that cycling through them evicts the cache.
        """
        sets = [make(0)]
        size = sum(t.nbytes for t in sets[0])
        wanted = min(_MAX_SETS, -(-_ROTATED_BYTES // size)) if self.gpu else 1
        return sets + [make(seed) for seed in range(1, wanted)]

    def results(self) -> dict[str, Any]:
        """Return all results in the form in which they are written as JSON."""
        return {
            **({} if self.backend is None else {"backend": self.backend}),
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
    """Return the name of a CPU or GPU in a form suitable for file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def checked(
    name: str, own: Way, eager: Way, operands: Sequence[Tensor], *args: Any
) -> Callable[[Any], bool]:
    """Check fused_attn; return a function that checks if a peer's first result is accurate.

    Args:
        args: arguments of `contract.check` from `dtype` on.

    Raises:
        AssertionError: a result of fused_attn violates the contract.
    """
    named = {str(i): tensor for i, tensor in enumerate(operands)}
    verdict = contract.check(own, eager, named, *args)
    for finding in verdict.findings:
        if not finding.ok:
            raise AssertionError(f"{name} is wrong: {finding}")
    return verdict.agrees


def check_model(
    ours: Callable[[], Tensor], theirs: Callable[[Module], Tensor], model: Module, real: Tensor
) -> None:
    """Check a model's float32 output for its real tokens against the contract.

    Args:
        ours: returns the output of the model that is timed.
        theirs: returns the output of its argument, which is `model` or a float64 copy of it.
        model: the model with torch's attention.
        real: (batch, seqlen) bool, True for real tokens.
    """
    with torch.no_grad():
        truth = theirs(copy.deepcopy(model).double().eval())[real]
        expected, got = theirs(model.eval())[real], ours()[real]
    finding = contract.judge("the model's output", got, truth, expected, gradient=False)
    assert finding.ok, str(finding)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]
