"""The `compare` fixture: check, measure, record; the results as JSON at the end."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import measure
import pytest
import torch
from measure import ceilings, peak_memory, unthrottled

import fused_attn
from fused_attn import _cpu

RESULTS = Path(__file__).parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the cases that are marked quick")
    parser.addoption("--results", default=None, help="write the results to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    config.stash[_RECORDS] = []
    if config.getoption("--quick"):
        measure.ROUND_SECONDS, measure.MIN_ROUNDS = 0.25, 3


_RECORDS = pytest.StashKey[list[dict[str, Any]]]()


@pytest.fixture(scope="session")
def machine() -> dict[str, Any]:
    """What the ceilings of this machine are at the start of the run."""
    return ceilings()


@pytest.fixture
def compare(request: pytest.FixtureRequest, benchmark: Any, machine: dict[str, Any]) -> Any:
    """compare(group, shape, dtype, ways, flops, bytes, check): measures ways, the first is ours."""

    def run(
        group: str,
        shape: Any,
        dtype: torch.dtype,
        ways: dict[str, Any],
        *,
        flops: float = 0.0,
        bytes: float = 0.0,
        check: Any = None,
    ) -> None:
        if request.config.getoption("--quick"):
            if not shape.quick:
                pytest.skip("reason: not among the quick cases")
            ways = {name: way for name, way in ways.items() if name != "eager"}
        if check is not None:
            check()
        seconds = unthrottled(ways)
        ours = next(iter(ways))
        record = {
            "group": group,
            "name": shape.name,
            "dtype": str(dtype).removeprefix("torch."),
            "source": shape.source,
            "milliseconds": {name: round(1e3 * s, 4) for name, s in seconds.items()},
            "speedup": {
                name: round(s / seconds[ours], 2) for name, s in seconds.items() if name != ours
            },
            "gflops": round(flops / seconds[ours] / 1e9, 1),
            "share_of_peak": round(flops / seconds[ours] / machine["multiply_add"], 3),
            "share_of_copy": round(bytes / seconds[ours] / machine["copy"], 3),
            "memory": {name: peak_memory(way) for name, way in ways.items()},
        }
        request.config.stash[_RECORDS].append(record)
        benchmark.extra_info.update(record)
        benchmark.pedantic(ways[ours], rounds=3, warmup_rounds=1)

    return run


def pytest_sessionfinish(session: pytest.Session) -> None:
    records = session.config.stash[_RECORDS]
    target = session.config.getoption("--results")
    if not records or target is None:
        return
    path = RESULTS / target
    path.parent.mkdir(exist_ok=True)
    results = {
        "machine": _machine(),
        "ceilings": {name: round(value / 1e9, 1) for name, value in ceilings().items()},
        "records": records,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "isa": _cpu.isa(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fused_attn": fused_attn.__version__,
        "commit": commit.stdout.strip(),
    }
