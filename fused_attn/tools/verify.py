"""The command `fused-attn verify`: correctness and speed of a backend on this machine.

It runs checks on a backend (tools/checks.py). It then times each class of problems against the
backend that calls run on without verification. The verdict is stored, and decides from then on
which classes the backend is selected for (backends/verdicts.py).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import AttentionProblem, get_backend, verdicts
from fused_attn.backends.registry import BACKENDS
from fused_attn.backends.verdicts import KINDS, NORM_FEATURES, OPTIONS, ClassVerdict, ProblemClass
from fused_attn.tools import contract, timing
from fused_attn.tools.checks import Check, NormCheck
from fused_attn.tools.contract import Finding
from fused_attn.tools.plan import Plan, Probe

# Smaller speed-ups cannot be distinguished from noise between two runs.
MIN_SPEEDUP = 1.05
WRONG = "wrong"  # `found` of a class with a failed check


@dataclass
class Trial:
    """A check and its outcome.

    Attributes:
        findings: a finding for each result; empty if the check did not complete.
        error: the exception raised instead; its cause may be outside the kernel.
        refused: the backend's reasons to reject the problem, or the out-of-memory message.
    """

    check: Check
    findings: list[Finding] = field(default_factory=list)
    error: str = ""
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Return True if no error was detected."""
        return not self.error and all(finding.ok for finding in self.findings)

    def rules_out(self, name: ProblemClass) -> bool:
        """Return True if this failure rules a class out.

        It rules out classes of its op and dtype that share one of its features, at all sizes. Wrong
        gradients rule out training only.
        """
        if (name.op, name.dtype) != (self.check.op, self.check.dtype):
            return False
        if name.feature not in self.check.features():
            return False
        outputs = [f for f in self.findings if not f.name.startswith("grad ")]
        gradients_only = not self.error and all(finding.ok for finding in outputs)
        return name.direction == "training" or not gradients_only

    def problem(self) -> str:
        """Return a description of the failure."""
        return self.error or "; ".join(str(f) for f in self.findings if not f.ok)


@dataclass
class Report:
    """Results of the verification of a backend.

    Attributes:
        identity: identity of the machine, see `verdicts.identity`.
        trials: outcomes of all checks that were run.
        classes: the verdict on each class.
        path: file that stores the verdict; None if it is not stored.
        lost: the device no longer computes in this process.
    """

    backend: str
    device: torch.device
    identity: dict[str, str]
    trials: list[Trial] = field(default_factory=list)
    classes: dict[ProblemClass, ClassVerdict] = field(default_factory=dict)
    path: Path | None = None
    lost: bool = False

    @property
    def wrong(self) -> list[Trial]:
        """Return the trials that failed."""
        return [trial for trial in self.trials if not trial.ok]

    @property
    def usable(self) -> list[ProblemClass]:
        """Return the classes that the backend is selected for from now on."""
        return [name for name, verdict in self.classes.items() if verdict.usable]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as types that JSON can represent."""
        return {
            "ok": not self.wrong,
            "identity": self.identity,
            "checks": len(self.trials),
            "not_taken": [repr(trial.check) for trial in self.trials if trial.refused],
            "wrong": [
                {"problem": repr(t.check), "found": t.problem(), "snippet": self.snippet(t)}
                for t in self.wrong
            ],
            "classes": {str(name): asdict(verdict) for name, verdict in self.classes.items()},
            "path": None if self.path is None else str(self.path),
        }

    def snippet(self, trial: Trial) -> str:
        """Return code that reproduces a failure, with the findings of this run as comments."""
        about = ", ".join(f"{key} {value}" for key, value in self.identity.items())
        kind = type(trial.check).__name__
        return "\n".join(
            [
                f"# {about}",
                f"from fused_attn.tools.checks import {kind}",
                f"{trial.check!r}.show({self.backend!r}, {self.device.type!r})",
                *[f"# {line}" for line in trial.problem().splitlines()],
            ]
        )

    def counts(self) -> list[tuple[str, ...]]:
        """Return table rows: what was checked, and how often it was right, wrong or rejected."""
        counted: dict[tuple[str, str], list[int]] = {}
        for trial in self.trials:
            kind = "norms" if isinstance(trial.check, NormCheck) else "attention"
            what = _LOOKS[trial.check.how].format(kind)
            row = counted.setdefault((trial.check.dtype, what), [0, 0, 0])
            row[2 if trial.refused else 0 if trial.ok else 1] += 1
        rows = [(*key, *map(str, row)) for key, row in counted.items()]
        if self.device.type != "cuda":
            rows.append(("", "CUDA graphs: not checked without a GPU", "", "", ""))
        return rows

    def speedups(self, norms: bool) -> list[tuple[str, ...]]:
        """Return table rows: op, dtype, sizes and direction of classes, and a cell per feature.

        The cell is the speed-up, in brackets if it is below MIN_SPEEDUP. It is "wrong" or "-" if
        there is none.
        """
        features = NORM_FEATURES if norms else (*KINDS, *OPTIONS)
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        for name, verdict in self.classes.items():
            if (name.op != "attention") == norms:
                key = (name.op, name.dtype, name.sizes, name.direction)
                rows.setdefault(key, {})[name.feature] = _cell(verdict)
        return [(*key, *(row.get(f, "") for f in features)) for key, row in rows.items()]


def _cell(verdict: ClassVerdict) -> str:
    if verdict.speedup is None:
        return "wrong" if verdict.found == WRONG else "-"
    return f"{verdict.speedup:.2f}" if verdict.usable else f"({verdict.speedup:.2f})"


_LOOKS = {
    "contract": "numerics of {}",
    "bits": "which weights dropout of {} keeps",
    "twice": "the same bits twice, {}",
    "graph": "CUDA graphs of {}",
}


def candidates() -> list[str]:
    """Return the backends that are selected only if verified, in order of preference."""
    return [name for name in BACKENDS if name in verdicts.KERNELS]


def device_of(backend: str) -> torch.device:
    """Return the current GPU, or the CPU for a backend whose kernels are emulated."""
    on_cpu = AttentionProblem(torch.device("cpu"), torch.float32, 8, 8)
    if not get_backend(backend).unsupported(on_cpu):
        return on_cpu.device
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index)


def against(backend: str) -> list[str]:
    """Return the reasons why a backend cannot be verified here; empty if it can."""
    own = get_backend(backend)
    problem = AttentionProblem(device_of(backend), torch.float32, 8, 8)
    return own.unavailable() or own.unsupported(problem)


def verify(backend: str, plan: Plan, advance: Callable[[], None] = lambda: None) -> Report:
    """Check and time a backend, and store the verdict in place of the previous one.

    Args:
        advance: called after each check and each class, outside the measurements.

    Raises:
        ValueError: the backend cannot run on this machine.
        OSError: the verdict cannot be stored.
    """
    reasons = against(backend)
    if reasons:
        raise ValueError(f"{backend} cannot be verified: {'; '.join(reasons)}")
    device = device_of(backend)
    report = Report(backend, device, verdicts.identity(backend, device))
    for check in plan.checks:
        _try(check, report)
        advance()
    for name, probes in plan.classes.items():
        if not _is_wrong(name, report):
            report.classes[name] = _judged(probes, plan.rounds, report)
        advance()
    for name in plan.classes:  # a later check may rule out an earlier class
        if _is_wrong(name, report):
            report.classes[name] = ClassVerdict(False, None, WRONG)
    report.path = verdicts.store(report.identity, report.classes)
    return report


def _is_wrong(name: ProblemClass, report: Report) -> bool:
    return report.lost or any(trial.rules_out(name) for trial in report.wrong)


def _try(check: Check, report: Report) -> Trial:
    """Run a check, unless the device no longer computes."""
    trial = Trial(check)
    if report.lost:
        return trial
    report.trials.append(trial)
    try:
        trial.findings = check.run(report.backend, report.device)
    except (NotImplementedError, torch.OutOfMemoryError) as error:
        trial.refused = str(error)
    except Exception as error:  # report any failure
        trial.error = f"{type(error).__name__}: {error}"
        report.lost = not _alive(report.device)
    return trial


def _alive(device: torch.device) -> bool:
    """Return True if a device still computes.

    After an illegal memory access, a GPU does not compute again in this process.
    """
    try:
        return torch.ones(2, device=device).sum().item() == 2.0
    except RuntimeError:
        return False


# ---- times --------------------------------------------------------------------------------------


def _judged(probes: Sequence[Probe], rounds: int, report: Report) -> ClassVerdict:
    """Check and time a class without a failure so far, and return its verdict."""
    slowest: tuple[float, str] | None = None
    for probe in probes:
        trial = _try(probe.checked, report)
        if trial.ok and not trial.refused and not report.lost:
            trial = Trial(probe.timed)
            try:
                found = _speedup(probe.timed, rounds, report)
                slowest = found if slowest is None else min(slowest, found)
            except torch.OutOfMemoryError:
                continue
            except NotImplementedError as error:
                trial.refused = str(error)
            except Exception as error:
                trial.error = f"{type(error).__name__}: {error}"
                report.trials.append(trial)
                report.lost = not _alive(report.device)
        if trial.refused:
            return ClassVerdict(False, None, "not to take it")
        if not trial.ok or report.lost:
            return ClassVerdict(False, None, WRONG)
    if slowest is None:
        return ClassVerdict(False, None, "too large for this GPU's memory")
    speedup, peer = slowest
    if speedup >= MIN_SPEEDUP:
        return ClassVerdict(True, speedup)
    return ClassVerdict(False, speedup, f"{speedup:.2f} times as fast as {peer}")


def _speedup(check: Check, rounds: int, report: Report) -> tuple[float, str]:
    """Return the speed-up over the first backend of torch operations, and its name."""
    call, operands = check.call(report.device), check.operands(report.device)
    leaves = [t.requires_grad_(check.gradients) for t in operands.values()]
    own = _timed(contract.by(report.backend, call), leaves, check.gradients)
    peer, others = _first_of_torch(call, leaves, check.gradients)
    ways = {report.backend: own, peer: others}
    measured = [timing.medians(ways, report.device, rounds, lambda: None)]
    if report.device.type == "cuda":
        # For short kernels, the launch overhead of the host limits a model, not the GPU's time.
        rows: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                rows[name].append(timing.row_seconds(way))
        measured.append({name: statistics.median(seconds) for name, seconds in rows.items()})
    return min(seconds[peer] / seconds[report.backend] for seconds in measured), peer


def _timed(call: Callable[..., Any], leaves: Sequence[Tensor], training: bool) -> timing.Call:
    """Return a function that runs a call, and its backward for training, after a first run."""
    if not training:

        def forward() -> Any:
            with torch.no_grad():
                return call(*leaves)

        forward()
        return forward
    grads = [torch.randn_like(out) for out in contract.results_of(call(*leaves))]

    def both() -> Any:
        return torch.autograd.grad(contract.results_of(call(*leaves)), leaves, grads)

    both()
    return both


def _first_of_torch(
    call: Callable[..., Any], leaves: Sequence[Tensor], training: bool
) -> tuple[str, timing.Call]:
    """Return the first backend of torch operations that accepts a call, and the call on it.

    Calls run on this backend if nothing was verified.
    """
    for name, backend in BACKENDS.items():
        if backend.differentiable:
            with contextlib.suppress(NotImplementedError):
                return name, _timed(contract.by(name, call), leaves, training)
    raise NotImplementedError("no backend of torch operations takes it")
