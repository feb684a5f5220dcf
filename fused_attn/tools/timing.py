"""Times of calls, on a CPU and on a GPU; for `bench` and the benchmarks of the repository."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], Any]

CALLS_A_ROUND = 5  # on a GPU
CALLS_IN_A_ROW = 20
# The host queues a round's calls meanwhile: of short kernels it would else be the host's time. A
# call takes it up to 1 ms (a backward with lists of tiles: ten launches).
QUEUE_CYCLES = 12_000_000  # 6 ms at 2 GHz


def cpu_seconds(call: Call) -> float:
    """Seconds of a call, after one that is not counted.

    The single-threaded parts of what ran before may have let a core go to sleep.
    """
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def gpu_seconds(calls: Sequence[Call], turn: int = 0) -> list[float]:
    """Seconds that the GPU takes for each call of a round, after one that is not counted.

    Args:
        calls: the same on each set of operands; each call of the round takes the next set.
        turn: of the set that is begun with.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS_A_ROUND + 1)]
    torch.cuda._sleep(QUEUE_CYCLES)
    calls[turn % len(calls)]()
    events[0].record()
    for i, event in enumerate(events[1:]):
        calls[(turn + 1 + i) % len(calls)]()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


def row_seconds(call: Call) -> float:
    """Seconds of a call of a row that the host issues to a GPU without a wait, after one that is
    not counted: the host's time where kernels are short, the GPU's where they are long."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS_IN_A_ROW):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS_IN_A_ROW


def medians(
    ways: Mapping[str, Call], device: torch.device, rounds: int, advance: Callable[[], None]
) -> dict[str, float]:
    """Median seconds of a call, by way.

    Args:
        ways: interleaved, so that what disturbs the machine disturbs all of them.
        device: where the calls run.
        rounds: how often each way is measured: one call on a CPU, CALLS_A_ROUND on a GPU.
        advance: called after each round, while nothing is measured.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name] += gpu_seconds([way]) if device.type == "cuda" else [cpu_seconds(way)]
        advance()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
