"""Calls in which memory runs out: `python out_of_memory.py BACKEND SEEDS`, with failing_malloc.cpp.

Each counted allocation of a call fails in turn, in three calls. A call must raise MemoryError or
RuntimeError, or return the correct result. The next call must return the correct result, and no
memory may leak.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import cuda_emulation
import soak_calls
import torch
from torch import Tensor

LARGE = 1 << 16  # bytes; libgomp ends the process if a smaller request fails
ALLOCATOR = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])


def counter(name: str) -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(ALLOCATOR, name)


def watch(module: str) -> None:
    """Count the allocations of a loaded module, and all allocations of at least LARGE bytes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0] for line in lines if f"/{module}." in line]
    counter("module_begin").value = int(mapped[0].partition("-")[0], 16)
    counter("module_end").value = int(mapped[-1].partition("-")[2], 16)
    counter("large").value = LARGE


class Trials:
    """Calls whose allocations fail, one after the other.

    Attributes:
        told: number of calls by error message, or "no exception".
        wrong: descriptions of wrong results, other exceptions and leaks.
    """

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, name: str, call: Callable[[], list[Tensor]]) -> None:
        requests, failing, blocks = map(counter, ("requests", "failing", "blocks"))
        for _ in range(3):  # fill pools and caches
            want = call()
        gc.collect()
        gc.freeze()  # later collections are faster
        requests.value = 0
        call()
        for number in range(1, requests.value + 1):
            lost = []
            for _ in range(3):  # memory that only the first call keeps may be a cache
                before, results, message = blocks.value, want, "no exception"
                requests.value, failing.value = 0, number
                try:
                    results = call()
                except (MemoryError, RuntimeError) as error:
                    message = f"{type(error).__name__}: {error}"
                except BaseException as error:
                    self.wrong.append(f"{name}, request {number}: {error!r}")
                failing.value = 0
                if not same(results, want) or not same(call(), want):
                    self.wrong.append(f"{name}, request {number}: wrong results, {message}")
                del results
                gc.collect()
                lost.append(blocks.value - before)
                self.told[message[:60]] += 1
            if min(lost[1:]) > 0:
                self.wrong.append(f"{name}, request {number}: {lost} blocks lost, {message}")


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def main() -> None:
    backend, seeds = sys.argv[1], int(sys.argv[2])
    kinds: dict[str, Callable[[soak_calls.Draw], list[Tensor]]] = soak_calls.OURS
    if backend == "cuda":
        cuda_emulation.use()
        soak_calls.DTYPES.remove(torch.float64)
        kinds = {"attention": functools.partial(soak_calls.attention, backend="cuda")}
    trials = Trials()
    for name, kind in kinds.items():
        for seed in range(seeds):
            torch.set_num_threads(1 + seed % 2)
            kind(soak_calls.Draw(seed))
            watch("_cpu" if backend == "cpp" else "_cuda_emulated")
            trials.run(f"{name} {seed}", lambda kind=kind, seed=seed: kind(soak_calls.Draw(seed)))
    print(json.dumps({"told": trials.told, "wrong": trials.wrong}))


if __name__ == "__main__":
    main()
