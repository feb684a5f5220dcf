"""Run random calls on several threads for a long time, and check memory, bits and progress.

    python scripts/soak.py --minutes 30 --threads 8

Half of the calls repeat earlier ones, on other numbers of kernel threads, and must return the same
bits, unless they contain torch's matmuls, whose bits depend on the number of threads, which other
threads set. Forked and new processes repeat calls, too, new ones also after Ctrl-C. The exit status
is 1 if bits differ, a call fails or memory grows, and after a deadlock, with the stacks of all
threads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from soak_calls import IN_PROCESSES, KINDS, OURS, Call, Draw, digest

import fused_attn

STUCK = 600  # seconds without a measurement of memory that count as a deadlock
GROWTH = 16.0  # MiB that may be added after the first quarter of the measurements
KEPT = 40  # recorded calls of each kind
COLUMNS = "calls", "repeated", "different", "failed"


class Soak:
    """Threads that make calls, and what they found."""

    def __init__(self, threads: int, seed: int) -> None:
        self.records: dict[Call, str] = {}
        self.counts = {kind: Counter(dict.fromkeys(COLUMNS, 0)) for kind in (*KINDS, *PROCESSES)}
        self.failures: list[str] = []
        self.memory: list[tuple[float, float]] = []  # seconds, MiB
        self.lock, self.idle = threading.Lock(), threading.Semaphore(0)
        self.running, self.ending = threading.Event(), threading.Event()
        draws = [Draw(1000 * seed + number) for number in range(threads)]
        self.threads = [threading.Thread(target=self.work, args=(r,), daemon=True) for r in draws]

    def work(self, r: Draw) -> None:
        """Make calls until the end, with a pause for each measurement of memory."""
        while not self.ending.is_set():
            if not self.running.is_set():
                self.idle.release()
                self.running.wait()
            kind = r.choice([*KINDS] * 20 + [*PROCESSES])
            try:
                if kind in PROCESSES:
                    PROCESSES[kind](self, r)
                else:
                    new = r.random() < 0.5
                    call = (kind, r.getrandbits(30)) if new else self.recorded(r, 1, [kind])[0]
                    self.compare([call], [digest(call, r.randint(1, 3))])
            except Exception:
                self.counts[kind]["failed"] += 1
                self.failures.append(f"{kind}: {traceback.format_exc()}")
            with self.lock:
                self.counts[kind]["calls"] += 1

    def recorded(self, r: Draw, count: int, kinds: Sequence[str]) -> list[Call]:
        """Return recorded calls, or new ones if there are too few."""
        with self.lock:
            known = [call for call in self.records if call[0] in kinds]
        return r.sample(known, count) if len(known) >= count else [(r.choice(kinds), 0)] * count

    def compare(self, calls: list[Call], digests: list[str]) -> None:
        """Record the bits of calls, or compare them with those of earlier ones."""
        for call, got in zip(calls, digests, strict=True):
            with self.lock:
                self.counts[call[0]]["repeated"] += call in self.records
                if call[0] in OURS and self.records.get(call, got) != got:
                    self.failures.append(f"other bits: {call}")
                    self.counts[call[0]]["different"] += 1
                elif sum(kind == call[0] for kind, _ in self.records) < KEPT:
                    self.records[call] = got

    def measure(self, began: float) -> None:
        """Note the resident memory while no call runs, without garbage and freed memory."""
        self.running.clear()
        for _ in self.threads:
            self.idle.acquire()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append((time.monotonic() - began, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
        faulthandler.dump_traceback_later(STUCK, exit=True)
        self.running.set()

    def run(self, minutes: float) -> tuple[float, float]:
        """Make calls for some minutes or until Ctrl-C; return the growth of memory, and an hour."""
        faulthandler.dump_traceback_later(STUCK, exit=True)
        began = time.monotonic()
        self.running.set()
        for thread in self.threads:
            thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < began + 60 * minutes:
                time.sleep(min(10.0, minutes))
                self.measure(began)
        self.ending.set()
        for thread in self.threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()
        x, y = torch.tensor(self.memory[len(self.memory) // 4 :], dtype=torch.float64).T
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        growth = float((x[-1] - x[0]) * slope)
        if growth > GROWTH:
            self.failures.append(f"memory grew by {growth:.0f} MiB")
        return growth, float(3600 * slope)


def fork(soak: Soak, r: Draw) -> None:
    """Repeat calls in a forked process, which has one thread: more would hang in torch."""
    calls, (read, write) = soak.recorded(r, 6, [*OURS]), os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(STUCK // 2)  # faulthandler hangs here: its thread is not in the child
            os.write(write, json.dumps([digest(call, 0) for call in calls]).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        told = file.read()
    os.waitpid(child, 0)
    assert told, f"no answer of the child of a fork: {calls}"
    soak.compare(calls, json.loads(told))


def interrupt(soak: Soak, r: Draw) -> None:
    """Repeat calls in a new process, first and after each Ctrl-C."""
    calls = soak.recorded(r, 3, IN_PROCESSES)
    command = [sys.executable, __file__, "--child", json.dumps(calls)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(6):
                soak.compare(calls, json.loads(child.stdout.readline()))
                time.sleep(0.1 + 0.2 * r.random())
                child.send_signal(signal.SIGINT)
        finally:
            child.kill()


def answer(calls: list[list]) -> None:
    """Print the digests of calls, first and after each Ctrl-C; make other calls meanwhile."""
    pending = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        pending.set()  # copy.deepcopy catches and drops exceptions (copyreg._slotnames)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    while True:
        pending.clear()
        with contextlib.suppress(KeyboardInterrupt):
            print(json.dumps([digest(tuple(call)) for call in calls]), flush=True)
            while not pending.is_set():
                digest((random.choice(IN_PROCESSES), random.getrandbits(30)))


PROCESSES = {"fork": fork, "interrupt": interrupt}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    fused_attn.enable()
    if args.child:
        answer(args.child)
    soak = Soak(args.threads, args.seed)
    growth, slope = soak.run(args.minutes)
    print("".join(f"{name:>12}" for name in ("", *COLUMNS)))
    for kind, count in soak.counts.items():
        print("".join(f"{cell:>12}" for cell in (kind, *count.values())))
    print(
        f"memory: {soak.memory[-1][1]:.0f} MiB, {growth:+.1f} after warm-up, {slope:+.1f} an hour"
    )
    print(*soak.failures[:20], f"{len(soak.failures)} failures", sep="\n")
    if args.output:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
        from measure import CpuMeter

        results = {"machine": CpuMeter().machine(), "minutes": args.minutes, "rows": soak.counts}
        results |= {"threads": args.threads, "memory": soak.memory, "failures": soak.failures}
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(len(soak.failures) > 0)


if __name__ == "__main__":
    main()
