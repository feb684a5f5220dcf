"""Pytest options, and the fixture `runner` for benchmarks on the CPU or the first GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tables
import torch
from measure import CpuMeter, GpuMeter
from runner import Runner, slug

from fused_attn.backends.registry import BACKENDS

RESULTS = Path(__file__).parent / "results"
_RUNNERS = pytest.StashKey[dict[str, Runner]]()  # keys "cpu" and "gpu"; created on first use


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the cases that are marked quick")
    parser.addoption(
        "--fast-peers", action="store_true", help="leave out peers that compile or take long"
    )
    parser.addoption("--results", default=None, help="write the results to this JSON file")
    parser.addoption(
        "--gpu-seconds", type=float, default=330.0,
        help="after which no further GPU benchmark is begun",
    )  # fmt: skip
    parser.addoption(
        "--gpu-backend", choices=tuple(BACKENDS), default="triton",
        help="whose kernels GPU benchmarks measure",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    config.stash[_RUNNERS] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU benchmarks without a GPU, and run GPU benchmarks that are not quick last."""
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    not_quick = pytest.mark.skip(reason="not among the quick cases")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        elif config.getoption("--quick") and not _is_quick(item):
            item.add_marker(not_quick)
    items.sort(key=lambda item: bool(item.get_closest_marker("gpu")) and not _is_quick(item))


def _is_quick(item: Any) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters["shape"].quick if "shape" in parameters else True


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Runner:
    """Return the session's runner for the test's device; skip the test after the time limit."""
    on = "gpu" if request.node.get_closest_marker("gpu") else "cpu"
    runners = request.config.stash[_RUNNERS]
    if on not in runners:
        runners[on] = _gpu_runner(request.config) if on == "gpu" else _cpu_runner(request.config)
    if runners[on].spent() > 1.0:
        pytest.skip("no time left: see --gpu-seconds")
    benchmark = request.getfixturevalue("benchmark") if on == "cpu" else None

    def show(record: dict[str, Any], call: Callable[[], Any]) -> None:
        request.node.user_properties.append(("measured", record))
        if benchmark is not None:
            benchmark.extra_info.update(record)
            benchmark.pedantic(call, rounds=3, warmup_rounds=1)

    runners[on].show = show
    return runners[on]


def _cpu_runner(config: pytest.Config) -> Runner:
    quick, target = config.getoption("--quick"), config.getoption("--results")
    meter, fast = CpuMeter(quick), quick or config.getoption("--fast-peers")
    machine = meter.machine()
    path = None if target is None else RESULTS / target
    if target == "cpu.json":  # one results file per CPU model
        path = RESULTS / f"cpu-{slug(machine['cpu'])}.json"
    return Runner(
        meter, torch.device("cpu"), None, meter.ceilings(), machine, quick=fast, path=path
    )


def _gpu_runner(config: pytest.Config) -> Runner:
    device = torch.device("cuda", 0)
    backend, target = config.getoption("--gpu-backend"), config.getoption("--results")
    meter = GpuMeter(device)
    machine = meter.machine()
    path = None if target is None else RESULTS / target
    if path is not None:
        path = path.with_stem(f"{path.stem}-{backend}-{slug(machine['gpu'])}")
    return Runner(
        meter, device, backend, meter.ceilings(), machine, gpu=True,
        seconds=config.getoption("--gpu-seconds"), path=path,
        quick=config.getoption("--quick") or config.getoption("--fast-peers"),
    )  # fmt: skip


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for on, runner in config.stash[_RUNNERS].items():
        if on == "gpu":
            terminalreporter.section("on the GPU")
            terminalreporter.line(tables.gpu_text(runner.results()))
