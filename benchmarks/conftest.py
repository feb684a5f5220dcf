"""The fixtures `compare` (CPU) and `runner` (GPU): check, measure, record; results as JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import gpu_measure
import gpu_table
import measure
import pytest
import torch
from gpu_run import Runner, slug
from measure import ceilings, commit, peak_memory, unthrottled

import fused_attn
from fused_attn import _cpu
from fused_attn.tools.doctor import cpu_model

RESULTS = Path(__file__).parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the cases that are marked quick")
    parser.addoption("--results", default=None, help="write the results to this JSON file")
    parser.addoption(
        "--gpu-seconds", type=float, default=330.0,
        help="after which no further GPU benchmark is begun",
    )  # fmt: skip
    parser.addoption(
        "--gpu-backend", choices=("cuda", "triton"), default="triton",
        help="whose kernels GPU benchmarks measure",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    config.stash[_RECORDS] = []
    config.stash[_RUNNERS] = []
    if config.getoption("--quick"):
        measure.ROUND_SECONDS, measure.MIN_ROUNDS = 0.25, 3


_RECORDS = pytest.StashKey[list[dict[str, Any]]]()
_RUNNERS = pytest.StashKey[list[Runner]]()  # one, where there is a GPU


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU benchmarks: skipped without one; those behind the aims come first."""
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    not_quick = pytest.mark.skip(reason="not among the quick cases")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        elif "gpu" in item.keywords and config.getoption("--quick") and not _is_quick(item):
            item.add_marker(not_quick)
    items.sort(key=lambda item: "gpu" in item.keywords and not _is_quick(item))


def _is_quick(item: Any) -> bool:
    return item.callspec.params["shape"].quick


@pytest.fixture(scope="session")
def gpu_runner(request: pytest.FixtureRequest) -> Runner:
    """Measures on the first GPU."""
    config, device = request.config, torch.device("cuda", 0)
    backend = config.getoption("--gpu-backend")
    target, machine = config.getoption("--results"), gpu_measure.machine(device)
    path = None if target is None else RESULTS / target
    if path is not None:
        path = path.with_stem(f"{path.stem}-{backend}-{slug(machine['gpu'])}")
    runner = Runner(
        device, backend, gpu_measure.ceilings(device), machine,
        config.getoption("--gpu-seconds"), path, quick=config.getoption("--quick"),
    )  # fmt: skip
    config.stash[_RUNNERS].append(runner)
    return runner


@pytest.fixture
def runner(gpu_runner: Runner) -> Runner:
    """The session's, while there is time."""
    if gpu_runner.spent() > 1.0:
        pytest.skip("no time left: see --gpu-seconds")
    return gpu_runner


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for runner in config.stash[_RUNNERS]:
        terminalreporter.section("on the GPU")
        terminalreporter.line(gpu_table.text(runner.results()))


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
    return {
        "cpu": cpu_model(),
        "isa": _cpu.isa(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fused_attn": fused_attn.__version__,
        "commit": commit(),
    }
