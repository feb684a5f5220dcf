"""Sections of scripts/gpu_session.py: pytest runs, the most important first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

GPU_TESTS = ("tests/gpu", "tests/ops", "tests/backends", "tests/nn", "tests/tools")
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
BACKENDS = ("triton", "cuda", "flex", "sdpa")  # the first that passes is benchmarked


@dataclass(frozen=True)
class Run:
    """One pytest process, with workers of pytest-xdist that are replaced when they die.

    Attributes:
        arguments: arguments of pytest. "{backend}" stands for the backend that is measured, and
            "{crashed}" for the first test that crashed; without one, the run is left out.
        processes: number of workers, at most one for each core.
        unit_seconds: time limit of a test.
        environment: additional environment variables.
        under: command that runs pytest, in one process, and whose last output is recorded.
    """

    arguments: Sequence[str]
    processes: int = 1
    unit_seconds: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)
    under: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """Runs that share a time limit.

    Attributes:
        seconds: time limit, less where the session's time ends.
        runs: pytest runs, one after another.
        beside: the section runs at the same time as the one before it.
        needs: compiled module without which the section is skipped, or "".
    """

    name: str
    seconds: float
    runs: Sequence[Run]
    beside: bool = False
    needs: str = ""


def _checks(backends: str, *arguments: str, **options: object) -> Run:
    return Run(("tests/gpu/test_checks.py", "-k", backends, *arguments), **options)  # type: ignore[arg-type]


def on_gpu() -> list[Section]:
    """Return the sections of a 530-second session on a machine with a GPU and 16 cores."""
    steal = ("--dist", "worksteal")
    smoke = ("tests/gpu/test_smoke.py", "-k")
    speed = ("benchmarks", "-m", "gpu", "--gpu-backend", "{backend}", "--gpu-seconds", "180")
    default = (
        "tests/gpu", "--ignore=tests/gpu/test_facts.py", "--ignore=tests/gpu/test_smoke.py",
        "-k", "not test_checks or sdpa or eager", *steal,
    )  # fmt: skip
    gpu = (*GPU_TESTS, "-m", "gpu", *steal)
    return [
        Section("facts", 25, [Run(["tests/gpu/test_facts.py"])]),
        Section("smoke", 45, [Run((*smoke, "not flex and not flash", *steal), 12)]),
        Section("default path", 50, [Run(default, 14)]),
        Section("cuda", 75, [Run((*gpu, "-k", "cuda"), 8)], needs="_cuda"),
        Section("triton", 140, [Run((*gpu, "--ignore=tests/gpu", "-k", "triton"), 6)]),
        Section(
            "triton checks",
            140,
            [_checks("triton and (bf16 or f32)", *steal, processes=6)],
            beside=True,
        ),
        Section(
            "flex",
            140,
            [
                Run((*smoke, "flex and not flash", *steal), 4, 90.0),
                _checks("flex and bf16 and not flash", *steal, processes=4, unit_seconds=90.0),
            ],
            beside=True,
        ),
        Section(
            "speed",
            100,
            [  # all problems against what is compiled already, then again with FlexAttention
                Run((*speed, "-k", "not test_call", "--fast-peers")),
                Run((*speed, "-k", "test_forward or test_backward")),
            ],
        ),
        Section(
            "host",
            20,
            [
                Run(("benchmarks", "-m", "gpu", "-k", "test_call", "--gpu-backend", backend))
                for backend in BACKENDS
            ],
        ),
        Section(
            "flash",
            90,
            [
                Run((*smoke, "flash", *steal), 14, 90.0),
                _checks("flash and bf16", *steal, processes=14, unit_seconds=90.0),
            ],
        ),
        Section("memcheck", 60, [Run(("{crashed}",), under=SANITIZER)]),
    ]  # fmt: skip


def dry() -> list[Section]:
    """Return the same sections on a CPU: CUDA emulated, Triton interpreted, flex's CPU kernel."""
    emulated, interpreted = {"CUDA_EMULATED": "1"}, {"TRITON_INTERPRET": "1"}
    smoke = ("tests/gpu/test_smoke.py", "-k")
    passes = "(-forward or -backward or -decode)"
    default = ("tests/gpu/test_default_path.py", "-k", "rows and f32")
    flex = ("tests/backends/test_flex.py", "-k", "test_compiled_forward and window")
    speed = ("benchmarks", "-m", "not gpu", "--quick", "-k", "small and float32 and forward")
    return [
        Section("facts", 40, [Run(["tests/gpu/test_facts.py"])]),
        Section("smoke", 50, [Run((*smoke, "sdpa"))]),
        Section("default path", 50, [Run(default)]),
        Section("cuda", 50, [Run((*smoke, f"cuda and {passes}"), environment=emulated)]),
        Section("triton", 60, [Run((*smoke, f"triton and {passes}"), environment=interpreted)]),
        Section(
            "triton checks",
            60,
            [_checks("triton and bf16 and Norm and rows3", environment=interpreted)],
            beside=True,
        ),
        Section("flex", 60, [Run(flex)], beside=True),
        Section("speed", 40, [Run(speed)]),
        Section("host", 40, [Run(speed)]),
        Section("flash", 10, [Run((*smoke, "flash"))]),
        Section("memcheck", 30, [Run(("{crashed}",), under=SANITIZER)]),
    ]
