"""Timing of several ways to compute the same thing, side by side in one run."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from fused_attn import _cpu
from fused_attn.tools.timing import cpu_seconds

# A machine whose peak moves by more than this between start and end of a case was throttled, or
# shared: the case is measured again, and fails if that does not help.
THROTTLE_LIMIT = 0.15
ROUND_SECONDS = 0.5  # a way
MIN_ROUNDS, MAX_ROUNDS = 5, 60


def medians(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of a call, by way.

    Ways are interleaved, so that what disturbs the machine disturbs all.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    begin = time.perf_counter()
    while True:
        for name, way in ways.items():
            taken[name].append(cpu_seconds(way))
        rounds = len(next(iter(taken.values())))
        spent = time.perf_counter() - begin
        if rounds >= MAX_ROUNDS or (rounds >= MIN_ROUNDS and spent > ROUND_SECONDS * len(ways)):
            return {name: statistics.median(seconds) for name, seconds in taken.items()}


def ceilings() -> dict[str, float]:
    """What the machine reaches now: FLOP/s of multiply-add and of bfloat16 pairs, bytes/s."""
    threads = torch.get_num_threads()
    source = torch.ones(16 << 20)
    target = torch.empty_like(source)
    copy = medians({"copy": lambda: target.copy_(source)})["copy"]
    read = medians({"read": source.sum})["read"]
    return {
        "multiply_add": _cpu.multiply_add_peak(threads),
        "pairs": _cpu.pair_peak(threads),
        "copy": 2 * source.nbytes / copy,
        "read": source.nbytes / read,
    }


def unthrottled(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """`medians`, taken again where the machine was slower after than before."""
    threads = torch.get_num_threads()
    for _ in range(3):
        before = _cpu.multiply_add_peak(threads)
        result = medians(ways)
        after = _cpu.multiply_add_peak(threads)
        if abs(after / before - 1) < THROTTLE_LIMIT:
            return result
    raise RuntimeError(f"the machine is throttled: {before / 1e9:.0f} -> {after / 1e9:.0f} GFLOP/s")


def peak_memory(way: Callable[[], Any]) -> int | None:
    """Bytes of resident memory that a call takes at its highest; None where that is not told."""
    way()
    _cpu.release_workspace()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier calls have left would be used
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the highest so far
    except OSError:
        return None
    before = _status("VmRSS")
    way()
    return max(0, _status("VmHWM") - before)


def commit() -> str:
    """The short hash of what is measured; empty outside of a clone."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git
        return ""
    return told.stdout.strip()


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
