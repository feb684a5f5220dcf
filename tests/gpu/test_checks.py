"""All checks of `fused-attn verify`, one test for each backend and check."""

from __future__ import annotations

import pytest
from devices import ON_GPU
from helpers import SLOW_BACKENDS
from judging_checks import OWN, run, runnable

from fused_attn.backends import verdicts
from fused_attn.tools import plan
from fused_attn.tools.cases import DTYPES
from fused_attn.tools.checks import Check

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Emulated kernels take seconds per call, so only one dtype and two widths run.
EMULATED = ("bfloat16",), plan.QUICK_WIDTHS


def checks_of(backend: str) -> list[Check]:
    dtypes, widths = EMULATED if backend in SLOW_BACKENDS else (DTYPES, verdicts.WIDTHS)
    return list(plan.checks(dtypes, widths, ON_GPU))


def short_id(backend: str, check: Check) -> str:
    """Return a test ID with a check's backend, dtype and values: sdpa-bf16-Norm-rows3-columns16."""
    kind, _, values = repr(check).rstrip(")").partition("(")
    words = [SHORT[check.dtype], kind.removesuffix("Check")]
    for text in values.split(", "):
        name, _, value = text.partition("=")
        value = value.strip("'").replace(",", "x")
        if name in ("shape", "mask", "how", "result"):
            words.append(value)
        elif value == "True":
            words.append(name)
        elif name != "dtype" and (name, value) != ("seed", "0"):
            words.append(name + value)
    return "-".join([backend, *words])


CASES = [
    pytest.param(backend, check, id=short_id(backend, check))
    for backend in runnable(["sdpa", "eager", *OWN])
    for check in checks_of(backend)
]


@pytest.fixture(autouse=True, scope="module")
def any_number_of_variants():
    """Let the backend "flex" compile any number of variants, as in `fused-attn verify`."""
    with verdicts.verifying():
        yield


@pytest.mark.parametrize(("backend", "check"), CASES)
def test_check(backend, check):
    run(backend, check)
