"""Timing of calls on CPUs and GPUs, for `bench`, `verify` and the repository's benchmarks."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fused_attn.tools.contract import results_of

Call = Callable[[], Any]

CALLS_A_ROUND = 5  # timed GPU calls per round
CALLS_IN_A_ROW = 20
# GPU cycles to sleep while the host queues the calls of a round. Without this delay, short kernels
# would be timed at the host's launch rate. Launching a call takes the host up to 1 ms (ten launches
# for a backward with tile lists).
QUEUE_CYCLES = 12_000_000  # 6 ms at 2 GHz


def cpu_seconds(call: Call) -> float:
    """Return the seconds of one call, measured after a warm-up call.

    The warm-up also wakes cores that went idle during single-threaded work.
    """
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def gpu_seconds(calls: Sequence[Call], turn: int = 0) -> list[float]:
    """Return the GPU time in seconds of each call of a round, after a warm-up call.

    Args:
        calls: the same call on different sets of operands. The round cycles through them.
        turn: index of the first set.
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
    """Return the mean seconds per call of back-to-back GPU calls, after a warm-up call.

    The result is the host's launch time for short kernels, and the GPU's time for long ones.
    """
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS_IN_A_ROW):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS_IN_A_ROW


def timed(
    call: Callable[..., Any], operands: Sequence[Tensor], passes: str, results: Any = None
) -> Call:
    """Return a callable that runs passes of call(*operands), after one warm-up run.

    Args:
        passes: "forward", "backward" (of one forward, which ran before) or "both".
        results: results of call(*operands), if it was called before; None to call it here.
    """
    if passes == "forward":
        step: Call = functools.partial(call, *operands)
    else:
        outs = results_of(call(*operands) if results is None else results)
        grads = [torch.randn_like(out) for out in outs]
        if passes == "backward":
            step = functools.partial(torch.autograd.grad, outs, operands, grads, retain_graph=True)
        else:
            del outs  # frees the graph before the next forward

            def step() -> Any:
                return torch.autograd.grad(results_of(call(*operands)), operands, grads)

    step()
    return step


def medians(
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    in_a_row: bool = False,
) -> dict[str, float]:
    """Return the median time in seconds of each implementation of a call.

    Args:
        calls: calls by name. Each round measures all of them, so that noise affects them equally.
        device: device that the calls run on.
        rounds: number of rounds. A round times one call of each implementation on a CPU, and
            CALLS_A_ROUND calls on a GPU.
        advance: callback that is called after each round, outside the measurements.
        in_a_row: time back-to-back calls on a GPU, as `row_seconds` does.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if in_a_row:
                taken[name].append(row_seconds(call))
            elif device.type == "cuda":
                taken[name] += gpu_seconds([call])
            else:
                taken[name].append(cpu_seconds(call))
        advance()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
