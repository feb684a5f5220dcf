"""Pytest plugin that runs PyTorch's tests on our replacements and records each outcome.

torch_suite.py loads the plugin (`-p torch_in_place`) in the processes that run PyTorch's tests.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import fused_attn
from fused_attn.backends.registry import BACKENDS
from fused_attn.base import small_calls
from fused_attn.nn.replacement import REPLACEMENTS

# Backend methods that compute the first pass of a call, wrapped to record that a kernel ran.
_PASSES = ("attention_fwd", "attention_weights", "attention_decode", "norm_fwd")

_on_kernels = False  # True if the current test has run one of our kernels


def _functions() -> None:
    """Replace torch's functions by ours, under all names that the tests use."""
    fused_attn.enable()
    torch.nn.functional.layer_norm = fused_attn.layer_norm
    torch.nn.functional.rms_norm = fused_attn.rms_norm  # type: ignore[assignment]


def _modules() -> None:
    """Replace torch.nn's classes by ours."""
    for theirs, ours in REPLACEMENTS.items():
        for namespace in (torch.nn, torch.nn.modules):
            if getattr(namespace, theirs.__name__, None) is theirs:
                setattr(namespace, theirs.__name__, ours)


# Name of a run -> function that patches torch before PyTorch's tests are imported.
SWAPS: dict[str, Callable[[], None]] = {
    "torch": lambda: None,
    "functions": _functions,
    "modules": _modules,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("PyTorch's tests")
    group.addoption("--swap", choices=SWAPS, default="torch")
    group.addoption("--outcomes", type=Path, help="JSON lines, the last line of a test counts")
    group.addoption("--about", default="", help="a regular expression that names of tests match")
    group.addoption("--most", type=int, default=0, help="how many parameters of one test; 0: all")


def pytest_configure(config: pytest.Config) -> None:
    SWAPS[config.option.swap]()
    # PyTorch's tests are small. Disable the limits that leave small calls to torch.
    small_calls.limits = small_calls.NONE
    for backend in BACKENDS.values():
        if not backend.differentiable:
            for name in _PASSES:
                _note_calls(type(backend), name)


def _note_calls(cls: type, name: str) -> None:
    compute = getattr(cls, name)

    @functools.wraps(compute)
    def noted(*args: Any, **kwargs: Any) -> Any:
        global _on_kernels
        out = compute(*args, **kwargs)
        _on_kernels |= out is not None
        return out

    setattr(cls, name, noted)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not match --about and tests that an earlier process has run."""
    about = re.compile(config.option.about)
    done = read_outcomes(config.option.outcomes)
    concerned = [item for item in items if about.search(_name(item.nodeid))]
    wanted = {i for i in _sample(concerned, config.option.most) if _name(i.nodeid) not in done}
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


def _sample(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return at most `most` parametrizations of each test, the same ones in every run."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        # The device separates the name of a PyTorch test from its parameters.
        tests.setdefault(re.split("_(?:cpu|cuda)", item.nodeid)[0], []).append(item)
    few = [t if len(t) <= (most or len(t)) else Random(0).sample(t, most) for t in tests.values()]
    return [item for test in few for item in test]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the test as crashed before it runs, so that the record remains after a crash."""
    global _on_kernels
    _on_kernels = False
    _write(item.config, _name(item.nodeid), "crashed")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "failed as expected" if report.skipped else "passed unexpectedly"
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.passed else report.longreprtext.strip()
        _write(item.config, _name(item.nodeid), outcome, why)
    return report


def _name(nodeid: str) -> str:
    """Return Class::test, the form of names in the tables of differences."""
    return nodeid.partition("::")[2]


def _write(config: pytest.Config, test: str, outcome: str, why: str = "") -> None:
    line = {"test": test, "outcome": outcome, "on_kernels": _on_kernels, "why": why}
    with config.option.outcomes.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last recorded outcome of each test, by name; empty if the file does not exist."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["test"]: line for line in map(json.loads, lines)}
