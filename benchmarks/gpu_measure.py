"""Timing on a GPU: CUDA events around calls that the host has queued ahead."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_shapes import COPY_BYTES, MATMUL_SIZE
from measure import commit

import fused_attn
from fused_attn.tools.timing import CALLS_A_ROUND, gpu_seconds

Calls = Sequence[Callable[[], Any]]  # the same on each set of operands

WAY_SECONDS, MIN_SAMPLES, MAX_SAMPLES = 0.1, 10, 50


def medians(ways: dict[str, Calls]) -> dict[str, float]:
    """Median seconds that the GPU takes for a call, by way.

    Ways are interleaved, so that what changes the clock changes it for all. The first call of a
    round is not counted, and each call takes the next set of operands.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    turn = 0
    while True:
        done = True
        for name, calls in ways.items():
            samples = taken[name]
            enough = sum(samples) >= WAY_SECONDS and len(samples) >= MIN_SAMPLES
            if enough or len(samples) >= MAX_SAMPLES:
                continue
            done = False
            samples += gpu_seconds(calls, turn)
        turn += CALLS_A_ROUND + 1
        if done:
            return {name: statistics.median(samples) for name, samples in taken.items()}


def host_medians(ways: dict[str, Calls]) -> dict[str, float]:
    """Median seconds from call to call as Python sees it; of kernels that are shorter than that."""
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


def ceilings(device: torch.device) -> dict[str, float]:
    """What the GPU reaches now: bytes/s copied (read and written), FLOP/s of a bfloat16 product."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device) for _ in "ab"
    )
    seconds = medians({"copy": [lambda: target.copy_(source)], "matmul": [lambda: a @ b]})
    return {
        "copy": 2 * source.nbytes / seconds["copy"],
        "matmul": 2 * MATMUL_SIZE**3 / seconds["matmul"],
    }


def peak_memory(call: Callable[[], Any]) -> int | None:
    """Bytes that a call takes at its highest."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "cores": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fused_attn": fused_attn.__version__,
        "commit": commit(),
    }
