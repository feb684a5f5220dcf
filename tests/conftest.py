"""Selection of tests by backend support, GPU availability and speed, and common fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_interpreter
from helpers import (
    BACKENDS,
    INTERPRETED,
    ISAS,
    SLOW_BACKENDS,
    device_of,
    runnable,
    takes,
    use_draw,
    use_isa,
)

from fused_attn.backends import verdicts
from fused_attn.base import small_calls

if INTERPRETED:
    triton_interpreter.repair()
NOT_HERE = [isa for isa in ISAS if not runnable(isa)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(f"not tested, because this CPU lacks them: {', '.join(NOT_HERE)}")


@pytest.fixture(autouse=True, scope="session")
def nothing_verified(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ignore the verdicts that `fused-attn verify` stored on this machine."""
    nowhere = tmp_path_factory.getbasetemp() / "verdicts"
    verdicts.folder = lambda: nowhere


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", type=int, default=0, help="added to the seeds of random inputs")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seed torch before each test, so that random numbers do not depend on the order of tests."""
    use_draw(request.config.getoption("--draw"))


@pytest.fixture(autouse=True)
def no_small_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run small calls on this package's kernels too, except in tests marked small_calls."""
    limits = small_calls.limits  # not monkeypatch, which would be undone after other fixtures
    if request.node.get_closest_marker("small_calls") is None:
        small_calls.limits = small_calls.NONE
    yield
    small_calls.limits = limits


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on the kernels of each instruction set that this CPU supports.

    parametrize("isa", ..., indirect=True) selects some of them. Unsupported ones are deselected
    instead of skipped, because skipping thousands of tests takes seconds.
    """
    with use_isa(request.param):
        yield request.param


@pytest.fixture
def verdict_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Store the verdicts of the test in a new folder, and yield its path."""
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    verdicts.read_again()
    yield tmp_path / "verdicts"
    verdicts.read_again()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Initialize a process group whose only rank is this process."""
    if not torch.distributed.is_available():
        pytest.skip("reason: needs torch.distributed")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.hookimpl(tryfirst=True)  # so that -m applies to the markers that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect unsupported parameters, mark thinned and GPU tests, and skip GPU tests on CPUs."""
    left_out = {item for item in items if not _is_selected(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if _thinned_out(item):
            item.add_marker("thorough")
        backend = _backend(item)
        if backend in BACKENDS and device_of(backend).type == "cuda":
            item.add_marker("gpu")
        # item.keywords would also contain the names of parent folders.
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _backend(item: pytest.Item) -> str | None:
    """Return a test's backend, from its parameter or its file name; None for tests without one."""
    of_file = "triton" if item.path.name.startswith("test_triton_") else None
    return _parameters(item).get("backend", of_file)


def _is_selected(item: pytest.Item) -> bool:
    """Return False if CPU or backend do not support the parameters or are too slow for the test."""
    backend, dtype = _backend(item), _parameters(item).get("dtype")
    if _parameters(item).get("isa") in NOT_HERE:
        return False
    if backend in SLOW_BACKENDS and item.get_closest_marker("not_emulated"):
        return False
    return backend not in BACKENDS or dtype is None or takes(backend, dtype)


def _thinned_out(item: pytest.Item) -> bool:
    """Return True if a `sampled` marker (or `thinned`, on slow backends) lists the parameters."""
    marks = list(item.iter_markers("sampled"))
    if _backend(item) in SLOW_BACKENDS:
        marks += item.iter_markers("thinned")
    parameters = _parameters(item)
    return any(
        all(parameters[name] in values for name, values in mark.kwargs.items()) for mark in marks
    )
