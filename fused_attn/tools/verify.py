"""The command `fused-attn verify`: correctness and speed of a backend on this machine.

The command runs the checks of tools/checks.py on a backend. It then times each problem class
against the backend that calls run on without verification. The stored verdict decides from then on
for which classes the backend is selected (backends/verdicts.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import AttentionProblem, get_backend, use_backend, verdicts
from fused_attn.backends.registry import BACKENDS
from fused_attn.backends.verdicts import WRONG, ClassVerdict, ProblemClass
from fused_attn.tools import timing
from fused_attn.tools.checks import Check, NormCheck
from fused_attn.tools.contract import Finding
from fused_attn.tools.isolation import Worker, WorkerError
from fused_attn.tools.plan import Plan
from fused_attn.tools.torch_semantics import adapted, exception, loosened

# Smaller speedups cannot be distinguished from the noise between two runs.
MIN_SPEEDUP = 1.05
# Compiling a kernel for a GPU takes up to two minutes (FlexAttention).
STEP_SECONDS = 300.0
MAX_LOST = 3  # successive processes whose first step failed, after which the GPU is no longer used


@dataclass
class Trial:
    """A check and its outcome.

    Attributes:
        findings: one finding per result; empty if the check did not complete.
        error: the exception that stopped the check; its cause may be outside the kernel.
        refused: the backend's reasons for rejecting the problem, or the out-of-memory message.
        too_large: True if `refused` is an out-of-memory message.
        lost: True if the process that ran the check can no longer use the device.
        speedup, peer: the speedup over another backend, and its name; None if not timed.
    """

    check: Check
    findings: list[Finding] = field(default_factory=list)
    error: str = ""
    refused: str = ""
    too_large: bool = False
    lost: bool = False
    speedup: float | None = None
    peer: str = ""

    @property
    def ok(self) -> bool:
        """Return True if the check found no error; a rejected problem counts as ok."""
        return not self.error and all(finding.ok for finding in self.findings)

    def rules_out(self, name: ProblemClass) -> bool:
        """Return True if this failed trial rules out the class `name`.

        A failure rules out all classes with the op and dtype of the check that have one of its
        features, at all sizes. If only gradients are wrong, it rules out only training.
        """
        covered = [(own.op, own.dtype, own.feature) for own in self.check.classes()]
        if (name.op, name.dtype, name.feature) not in covered:
            return False
        outputs = [f for f in self.findings if not f.name.startswith("grad ")]
        gradients_only = not self.error and all(finding.ok for finding in outputs)
        return name.direction == "training" or not gradients_only

    def failure(self) -> str:
        """Return a description of the failure, possibly of several lines."""
        return self.error or "; ".join(str(f) for f in self.findings if not f.ok)


@dataclass
class Report:
    """Results of verifying a backend on a device.

    Attributes:
        identity: identity of the machine and the kernels, see `verdicts.identity`.
        trials: outcomes of all checks that ran.
        judged: verdict on each problem class, from the checks of this class alone.
        path: file in which the verdict is stored; None if it is not stored.
        not_stored: why it could not be stored; empty otherwise.
    """

    backend: str
    device: torch.device
    identity: dict[str, str]
    trials: list[Trial] = field(default_factory=list)
    judged: dict[ProblemClass, ClassVerdict] = field(default_factory=dict)
    path: Path | None = None
    not_stored: str = ""

    @property
    def wrong(self) -> list[Trial]:
        """Return the trials that failed."""
        return [trial for trial in self.trials if not trial.ok]

    @property
    def classes(self) -> dict[ProblemClass, ClassVerdict]:
        """Return the verdict on each class; a later check may rule out an earlier class."""
        wrong = ClassVerdict(False, None, WRONG)
        return {n: wrong if _is_wrong(n, self) else own for n, own in self.judged.items()}

    @property
    def usable(self) -> list[ProblemClass]:
        """Return the classes that the backend is selected for from now on."""
        return [name for name, verdict in self.classes.items() if verdict.usable]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of JSON-serializable values."""
        return {
            "ok": not self.wrong,
            "identity": self.identity,
            "checks": len(self.trials),
            "not_taken": [repr(trial.check) for trial in self.trials if trial.refused],
            "wrong": [
                {"problem": repr(t.check), "found": t.failure(), "snippet": self.snippet(t)}
                for t in self.wrong
            ],
            "classes": {str(name): asdict(verdict) for name, verdict in self.classes.items()},
            "path": None if self.path is None else str(self.path),
        }

    def snippet(self, trial: Trial) -> str:
        """Return code that reproduces a failure, followed by this run's findings as comments."""
        about = ", ".join(f"{key} {value}" for key, value in self.identity.items())
        kind = type(trial.check).__name__
        return "\n".join(
            [
                f"# {about}",
                f"from fused_attn.tools.checks import {kind}",
                f"{trial.check!r}.show({self.backend!r}, {self.device.type!r})",
                *[f"# {line}" for line in trial.failure().splitlines()],
            ]
        )

    def counts(self) -> list[tuple[str, ...]]:
        """Return table rows: dtype, property checked, and counts of right, wrong and rejected."""
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

    def speedups(self, norms: bool) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return features, and table rows: op, dtype, sizes, direction, and a cell per feature.

        A cell shows the verdict on the class with this feature: the speedup, in brackets if the
        class is not usable; without a speedup, "wrong" or "-". It is empty if there is no verdict.
        """
        classes = {n: v for n, v in self.classes.items() if (n.op != "attention") == norms}
        features = list(dict.fromkeys(name.feature for name in classes))
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        for name, verdict in classes.items():
            key = (name.op, name.dtype, name.sizes, name.direction)
            rows.setdefault(key, {})[name.feature] = _cell(verdict)
        return features, [(*key, *(row.get(f, "") for f in features)) for key, row in rows.items()]


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
    """Return the backends that are the default only where verified, in order of preference."""
    return [name for name in BACKENDS if name in verdicts.KERNELS]


def device_of(backend: str) -> torch.device:
    """Return the CPU if the backend runs on it but not on a GPU of this machine, else the GPU."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    cpu, gpu = torch.device("cpu"), torch.device("cuda", index)
    own = get_backend(backend)
    if torch.cuda.is_available() and not own.unsupported(_problem(gpu, torch.bfloat16)):
        return gpu
    return gpu if own.unsupported(_problem(cpu, torch.float32)) else cpu


def _problem(device: torch.device, dtype: torch.dtype) -> AttentionProblem:
    return AttentionProblem(device, dtype, 64, 64, needs_grad=True)


def against(backend: str) -> list[str]:
    """Return the reasons why a backend cannot be verified on this machine; empty if it can."""
    own, device = get_backend(backend), device_of(backend)
    reasons = own.unavailable()
    if device.type == "cuda" and not torch.cuda.is_available():
        reasons = reasons or ["requires a GPU, but torch finds none"]
    # Some backends support only 16-bit types.
    dtypes = torch.float32, torch.bfloat16
    against = [own.unsupported(AttentionProblem(device, dtype, 64, 64)) for dtype in dtypes]
    return reasons or (against[0] if all(against) else [])


def verify(backend: str, plan: Plan, advance: Callable[[Report], None] = lambda _: None) -> Report:
    """Check and time a backend, and store the verdict, which replaces the previous one.

    On a GPU, checks and timings run in a separate process, which is replaced if it crashes or
    if its GPU context breaks. The verdict is stored again after each class, so that an interrupted
    run keeps its results. A backend that needs no verdict is only checked.

    Args:
        backend: name of the backend.
        plan: checks to run and problems to time.
        advance: callback that is called with the report after each check and each class, outside
            the measurements.

    Raises:
        ValueError: the backend cannot run on this machine.
    """
    reasons = against(backend)
    if reasons:
        raise ValueError(f"{backend} cannot be verified: {'; '.join(reasons)}")
    device = device_of(backend)
    report = Report(backend, device, verdicts.identity(backend, device))
    with _runner(report) as run:
        for check in plan.checks:
            report.trials.append(run(_checked, check))
            advance(report)
        for name, probes in plan.classes.items() if backend in verdicts.KERNELS else ():
            if _is_wrong(name, report):
                report.judged[name] = ClassVerdict(False, None, WRONG)
            else:
                report.judged[name] = _judged(probes, plan.rounds, report, run)
            _store(report)
            advance(report)
    return report


Run = Callable[..., Trial]


@contextlib.contextmanager
def _runner(report: Report) -> Iterator[Run]:
    """Yield a function that runs a step for a check: run(step, check, *args).

    Steps for the CPU run in this process. All others run in a worker process, and a step that kills
    it fails. If no process can use the GPU any more, the remaining steps fail without being run.
    """
    backend, device = report.backend, report.device
    if device.type == "cpu":
        yield lambda step, check, *args: step(check, backend, device, *args)
        return
    worker, failed_starts, steps = Worker(STEP_SECONDS), 0, 0

    def run(step: Any, check: Check, *args: Any) -> Trial:
        nonlocal failed_starts, steps
        if failed_starts == MAX_LOST:
            return Trial(check, error=f"not run, because the GPU failed in {MAX_LOST} processes")
        steps += 1
        try:
            trial: Trial = worker.run(step, check, backend, device, *args)
        except WorkerError as death:
            trial = Trial(check, error=str(death), lost=True)
        if trial.lost:
            worker.stop()
            failed_starts, steps = (failed_starts + 1 if steps == 1 else 0), 0
        return trial

    try:
        yield run
    finally:
        worker.stop()


def _is_wrong(name: ProblemClass, report: Report) -> bool:
    return any(trial.rules_out(name) for trial in report.wrong)


def _store(report: Report) -> None:
    try:
        report.path = verdicts.store(report.identity, report.classes)
    except OSError as error:  # the report must not be lost
        report.not_stored = str(error)


def _checked(check: Check, backend: str, device: torch.device) -> Trial:
    """Run a check, and return its trial."""
    trial = Trial(adapted(backend, check))
    trial.refused = exception(backend, check, device.type == "cuda")
    if not trial.refused:
        with _failures_in(trial, device):
            findings = trial.check.run(backend, device)
            by_torch = get_backend(backend).wraps_torch
            trial.findings = [*map(loosened, findings)] if by_torch else findings
    return trial


def _timed_check(check: Check, backend: str, device: torch.device, rounds: int) -> Trial:
    """Time a check's problem, and return a trial with the speedup."""
    trial = Trial(check)
    with _failures_in(trial, device):
        trial.speedup, trial.peer = _speedup(check, rounds, backend, device)
    return trial


@contextlib.contextmanager
def _failures_in(trial: Trial, device: torch.device) -> Iterator[None]:
    """Run a step within the block; if it fails, record the reason in the trial."""
    try:
        with verdicts.verifying():
            yield
    except (NotImplementedError, torch.OutOfMemoryError) as error:
        trial.refused, trial.too_large = str(error), isinstance(error, torch.OutOfMemoryError)
    except Exception as error:  # report every failure
        trial.error = f"{type(error).__name__}: {error}"
        trial.lost = not _alive(device)


def _alive(device: torch.device) -> bool:
    """Return False if all further CUDA calls fail, as after an illegal memory access."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def _judged(probes: Sequence[Check], rounds: int, report: Report, run: Run) -> ClassVerdict:
    """Check and time the probes of a class; return its verdict."""
    slowest: tuple[float, str] | None = None
    for probe in probes:
        trial = run(_checked, probe.reduced())
        report.trials.append(trial)
        if trial.ok and not trial.refused:
            trial = run(_timed_check, probe, rounds)
            if trial.error:
                report.trials.append(trial)
            if trial.too_large:
                continue
        if trial.refused:
            return ClassVerdict(False, None, "unsupported")
        if not trial.ok:
            return ClassVerdict(False, None, WRONG)
        assert trial.speedup is not None
        slowest = min(slowest or (math.inf, ""), (trial.speedup, trial.peer))
    if slowest is None:
        return ClassVerdict(False, None, "too large for this GPU's memory")
    speedup, peer = slowest
    if speedup >= MIN_SPEEDUP:
        return ClassVerdict(True, speedup)
    return ClassVerdict(False, speedup, f"{speedup:.2f} times as fast as {peer}")


def _speedup(check: Check, rounds: int, backend: str, device: torch.device) -> tuple[float, str]:
    """Return the speedup over the first torch-based backend, and the name of that backend."""
    call, operands = check.call(device), check.operands(device)
    leaves = [t.requires_grad_(check.gradients) for t in operands.values()]
    passes = "both" if check.gradients else "forward"
    with torch.set_grad_enabled(check.gradients):
        own = timing.timed(use_backend(backend)(call), leaves, passes)
        peer, others = _first_of_torch(call, leaves, passes)
        calls = {backend: own, peer: others}
        measured = [timing.medians(calls, device, rounds)]
        if device.type == "cuda":
            # The launch overhead on the host, not the GPU time, limits models with short kernels.
            measured.append(timing.medians(calls, device, rounds, in_a_row=True))
    return min(seconds[peer] / seconds[backend] for seconds in measured), peer


def _first_of_torch(
    call: Callable[..., Any], leaves: Sequence[Tensor], passes: str
) -> tuple[str, timing.Call]:
    """Return the name of the first torch-based backend that accepts a call, and the call on it.

    Unverified calls run on this backend.
    """
    for name, backend in BACKENDS.items():
        if backend.differentiable and name not in verdicts.KERNELS:
            with contextlib.suppress(NotImplementedError):
                return name, timing.timed(use_backend(name)(call), leaves, passes)
    raise NotImplementedError("no torch-based backend supports the call")
