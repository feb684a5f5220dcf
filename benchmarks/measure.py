"""Meters of times, memory and peak rates on a CPU or GPU, which interleave implementations."""

from __future__ import annotations

import ctypes
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

import fused_attn
from fused_attn.tools.ceilings import cpu_ceilings
from fused_attn.tools.doctor import cpu_model
from fused_attn.tools.timing import CALLS_A_ROUND, cpu_seconds, gpu_seconds

Calls = Sequence[Callable[[], Any]]  # the same call on different operand sets

# A larger relative change of the peak rate during a case shows that the machine was throttled or
# shared. The case is then measured again, up to three times in total, before it fails.
THROTTLE_LIMIT = 0.15
MAX_ROUNDS = 60
# On a GPU, an implementation is measured for WAY_SECONDS, within these numbers of samples.
WAY_SECONDS, MIN_SAMPLES, MAX_SAMPLES = 0.1, 10, 50
MATMUL_SIZE, COPY_BYTES = 8192, 1 << 30  # problems that measure a GPU's peak rates


class Meter(Protocol):
    """Interface to measure times, memory and peak rates of a device."""

    def peak(self, dtype: str) -> str:
        """Return the name of the arithmetic peak rate for a dtype."""

    def seconds(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Return the median seconds per call of each implementation, over all operand sets.

        Implementations are interleaved, so that disturbances and clock changes affect all equally.
        """

    def host_seconds(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Return the median host time between calls in seconds, for each implementation."""

    def memory(self, call: Callable[[], Any]) -> int | None:
        """Return the peak memory of a call in bytes; None if the system does not report it."""

    def ceilings(self) -> dict[str, float]:
        """Measure the machine's current peak rates in FLOP/s and bytes/s (read plus written)."""

    def machine(self) -> dict[str, Any]:
        """Return hardware and versions that affect results. No value identifies the machine."""


class CpuMeter:
    """Meter for the CPU.

    Args:
        quick: measure for fewer rounds.
    """

    def __init__(self, quick: bool = False) -> None:
        from fused_attn import _cpu  # GPU benchmarks do without the compiled module

        self.module = _cpu
        self.round_seconds, self.min_rounds = (0.25, 3) if quick else (0.5, 5)

    def seconds(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Return median seconds. Measure again if the machine's peak rate changed meanwhile."""
        threads = torch.get_num_threads()
        for _ in range(3):
            before = self.module.multiply_add_peak(threads)
            result = self.medians(ways)
            after = self.module.multiply_add_peak(threads)
            if abs(after / before - 1) < THROTTLE_LIMIT:
                return result
        raise RuntimeError(
            f"the machine is throttled: {before / 1e9:.0f} -> {after / 1e9:.0f} GFLOP/s"
        )

    host_seconds = seconds

    def medians(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Return median seconds, whatever the machine's speed. Ratios of them are comparable."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        begin = time.perf_counter()
        for turn in range(MAX_ROUNDS):
            for name, calls in ways.items():
                taken[name].append(cpu_seconds(calls[turn % len(calls)]))
            spent = time.perf_counter() - begin
            if turn + 1 >= self.min_rounds and spent > self.round_seconds * len(ways):
                break
        return {name: statistics.median(seconds) for name, seconds in taken.items()}

    def memory(self, call: Callable[[], Any]) -> int | None:
        """Return the peak growth of resident memory in bytes; None if it cannot be measured."""
        call()
        self.module.release_workspace()
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory, so that the call cannot reuse it
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # reset the peak resident size (VmHWM)
        except OSError:
            return None
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)

    def ceilings(self) -> dict[str, float]:
        """Measure the rates of matmuls by dtype, float32 multiply-adds, copying and reading."""
        return cpu_ceilings()

    def peak(self, dtype: str) -> str:
        return dtype

    def machine(self) -> dict[str, Any]:
        return {
            "cpu": cpu_model(),
            "isa": self.module.isa(),
            "threads": torch.get_num_threads(),
            **_versions(),
        }


class GpuMeter:
    """Meter for a GPU: `seconds` times queued calls with CUDA events, which excludes host time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak(self, dtype: str) -> str:
        return "matmul"

    def seconds(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Return median seconds, excluding the first call of each round as warm-up."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        turn = 0
        while unfinished := [name for name in ways if not _enough(taken[name])]:
            for name in unfinished:
                taken[name] += gpu_seconds(ways[name], turn)
            turn += CALLS_A_ROUND + 1
        return {name: statistics.median(samples) for name, samples in taken.items()}

    def host_seconds(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Return median seconds per call of back-to-back calls, which the host limits."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(20):
            for name, calls in ways.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for i in range(100):
                    calls[i % len(calls)]()
                torch.cuda.synchronize()
                taken[name].append((time.perf_counter() - start) / 100)
        return {name: statistics.median(samples) for name, samples in taken.items()}

    def memory(self, call: Callable[[], Any]) -> int | None:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def ceilings(self) -> dict[str, float]:
        """Measure the rates of copying and of a bfloat16 matmul."""
        source = torch.randn(COPY_BYTES // 4, device=self.device)
        target = torch.empty_like(source)
        size = (MATMUL_SIZE, MATMUL_SIZE)
        a, b = (torch.randn(size, dtype=torch.bfloat16, device=self.device) for _ in "ab")
        seconds = self.seconds({"copy": [lambda: target.copy_(source)], "matmul": [lambda: a @ b]})
        return {
            "copy": 2 * source.nbytes / seconds["copy"],
            "matmul": 2 * MATMUL_SIZE**3 / seconds["matmul"],
        }

    def machine(self) -> dict[str, Any]:
        import triton

        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "cores": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "triton": triton.__version__,
            **_versions(),
        }


def _enough(samples: list[float]) -> bool:
    """Return True if an implementation has enough samples on a GPU."""
    for_long = sum(samples) >= WAY_SECONDS and len(samples) >= MIN_SAMPLES
    return for_long or len(samples) >= MAX_SAMPLES


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fused_attn": fused_attn.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """Return the short hash of the current commit; empty without git or outside a clone."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # git is not installed
        return ""
    return told.stdout.strip()


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
