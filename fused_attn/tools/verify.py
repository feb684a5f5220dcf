"""`fused-attn verify`: is a backend right on this machine, and where is it faster than torch?

It puts problems to a backend (tools/checks.py), then times it, class by class, against what a call
runs on where nothing was verified. What it found is stored, and from then on decides the choice
(backends/verdicts.py).
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

# Less is not told apart from the noise between two runs.
MIN_SPEEDUP = 1.05
WRONG = "wrong"  # `found` of a class that is not to be trusted


@dataclass
class Trial:
    """A check, and what came of it.

    Attributes:
        findings: of each result; empty where there is none.
        error: the exception that there was instead; the kernel may not have been to blame.
        refused: the backend's reasons not to take the problem.
    """

    check: Check
    findings: list[Finding] = field(default_factory=list)
    error: str = ""
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Nothing wrong was seen."""
        return not self.error and all(finding.ok for finding in self.findings)

    def rules_out(self, name: ProblemClass) -> bool:
        """True if this failure rules a class out: one of the same op and type that shares a
        feature, whatever its sizes. Wrong gradients rule out training only.
        """
        if (name.op, name.dtype) != (self.check.op, self.check.dtype):
            return False
        if name.feature not in self.check.features():
            return False
        outputs = [f for f in self.findings if not f.name.startswith("grad ")]
        gradients_only = not self.error and all(finding.ok for finding in outputs)
        return name.direction == "training" or not gradients_only

    def problem(self) -> str:
        """What is wrong, in a line."""
        return self.error or "; ".join(str(f) for f in self.findings if not f.ok)


@dataclass
class Report:
    """What was found of a backend.

    Attributes:
        identity: of the machine, see `verdicts.identity`.
        trials: of all checks that were made.
        classes: the verdict.
        path: where it is stored; None where it is not.
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
        """The trials that went wrong."""
        return [trial for trial in self.trials if not trial.ok]

    @property
    def usable(self) -> list[ProblemClass]:
        """The classes that the backend is chosen for from now on."""
        return [name for name, verdict in self.classes.items() if verdict.usable]

    def to_dict(self) -> dict[str, Any]:
        """All of it in types that JSON knows."""
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
        """Code that shows again what went wrong, with what was seen here."""
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
        """Rows of a table: what was looked at, and how often it was right, wrong, not taken."""
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
        """Rows of a table: op, type, sizes and direction of classes, and for each feature the
        speed-up, in brackets where it is not enough, or why there is none."""
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
    """The backends that are chosen only where they were verified, in order of preference."""
    return [name for name in BACKENDS if name in verdicts.KERNELS]


def device_of(backend: str) -> torch.device:
    """Where a backend runs: on the current GPU, or where its kernels are emulated, on the CPU."""
    on_cpu = AttentionProblem(torch.device("cpu"), torch.float32, 8, 8)
    if not get_backend(backend).unsupported(on_cpu):
        return on_cpu.device
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index)


def against(backend: str) -> list[str]:
    """Reasons why a backend cannot be verified here; empty if it can."""
    own = get_backend(backend)
    problem = AttentionProblem(device_of(backend), torch.float32, 8, 8)
    return own.unavailable() or own.unsupported(problem)


def verify(backend: str, plan: Plan, advance: Callable[[], None] = lambda: None) -> Report:
    """Checks a backend and times it, and stores the verdict in place of the one that there was.

    Args:
        advance: called after each check and each class, while nothing is measured.

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
    for name in plan.classes:  # the last problem may tell of the first class
        if _is_wrong(name, report):
            report.classes[name] = ClassVerdict(False, None, WRONG)
    report.path = verdicts.store(report.identity, report.classes)
    return report


def _is_wrong(name: ProblemClass, report: Report) -> bool:
    return report.lost or any(trial.rules_out(name) for trial in report.wrong)


def _try(check: Check, report: Report) -> Trial:
    """Makes a check, unless the GPU has stopped."""
    trial = Trial(check)
    if report.lost:
        return trial
    report.trials.append(trial)
    try:
        trial.findings = check.run(report.backend, report.device)
    except (NotImplementedError, torch.OutOfMemoryError) as error:
        trial.refused = str(error)
    except Exception as error:  # whatever is broken here is what is to be found out
        trial.error = f"{type(error).__name__}: {error}"
        report.lost = not _alive(report.device)
    return trial


def _alive(device: torch.device) -> bool:
    """Whether a device computes; after an access to memory that is not there, a GPU does not in
    this process."""
    try:
        return torch.ones(2, device=device).sum().item() == 2.0
    except RuntimeError:
        return False


# ---- times --------------------------------------------------------------------------------------


def _judged(probes: Sequence[Probe], rounds: int, report: Report) -> ClassVerdict:
    """The verdict on a class in which nothing wrong was seen so far."""
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
    """How many times as fast the backend is, and as which one: the first that is torch's own."""
    call, operands = check.call(report.device), check.operands(report.device)
    leaves = [t.requires_grad_(check.gradients) for t in operands.values()]
    own = _timed(contract.by(report.backend, call), leaves, check.gradients)
    peer, others = _first_of_torch(call, leaves, check.gradients)
    ways = {report.backend: own, peer: others}
    measured = [timing.medians(ways, report.device, rounds, lambda: None)]
    if report.device.type == "cuda":
        # The GPU's time is not all that a model sees: of short kernels it sees the host's.
        rows: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                rows[name].append(timing.row_seconds(way))
        measured.append({name: statistics.median(seconds) for name, seconds in rows.items()})
    return min(seconds[peer] / seconds[report.backend] for seconds in measured), peer


def _timed(call: Callable[..., Any], leaves: Sequence[Tensor], training: bool) -> timing.Call:
    """A call, and its backward where that is wanted; it has run once."""
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
    """What a call runs on where nothing was verified: the first backend of torch operations that
    takes it, and the call by it."""
    for name, backend in BACKENDS.items():
        if backend.differentiable:
            with contextlib.suppress(NotImplementedError):
                return name, _timed(contract.by(name, call), leaves, training)
    raise NotImplementedError("no backend of torch operations takes it")
