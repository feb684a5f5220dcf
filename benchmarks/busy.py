"""Time attention and norms on oversubscribed cores: `python benchmarks/busy.py --output busy.json`.

Busy-looping processes compete with torch's threads for the cores. The 90th percentile of the time
shows how long calls wait. Calls of fused_attn and of torch alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import CpuMeter

import fused_attn as fa

CALLS, WARM_UP = 1600, 20
BUSY = (0, 1, 2)  # numbers of competing processes


def cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls of fused_attn and of torch for each case, by name."""
    qkv = torch.randn(3, 8, 12, 128, 32).unbind()
    leaves = [t.clone().requires_grad_() for t in qkv]
    grad = torch.randn_like(qkv[0])
    x, weight, bias = torch.randn(1024, 768), torch.randn(768), torch.randn(768)
    modules = {"fused_attn": fa, "torch": torch.nn.functional}

    def train(attend: Callable[..., Any]) -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, grad)

    return {
        "attention, forward": {
            name: lambda m=m: m.scaled_dot_product_attention(*qkv) for name, m in modules.items()
        },
        "attention, training": {
            name: lambda m=m: train(m.scaled_dot_product_attention) for name, m in modules.items()
        },
        "layer_norm of 1024 x 768": {
            name: lambda m=m: m.layer_norm(x, (768,), weight, bias) for name, m in modules.items()
        },
    }


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run this many busy-looping processes within the block."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(processes)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def milliseconds(ways: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Return the median and 90th percentile in ms of each call; rounds alternate in order."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP + CALLS):
        in_turn = list(ways.items())
        for name, way in reversed(in_turn) if turn % 2 else in_turn:
            began = time.perf_counter()
            way()
            if turn >= WARM_UP:
                took[name].append((time.perf_counter() - began) * 1e3)
    return {
        name: {"median": statistics.median(t), "p90": statistics.quantiles(t, n=10)[-1]}
        for name, t in took.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    records = []
    for name, ways in cases().items():
        for processes in BUSY:
            with busy(processes):
                ms = milliseconds(ways)
            records.append({"name": name, "busy": processes, "ms": ms})
            ratios = [ms["torch"][key] / ms["fused_attn"][key] for key in ("median", "p90")]
            print(f"{name:26} {processes} busy: {ratios[0]:.2f} {ratios[1]:.2f}", flush=True)
    if args.output:
        results = {"machine": CpuMeter().machine(), "records": records}
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
