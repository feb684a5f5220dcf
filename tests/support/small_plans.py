"""Small plans for tests of `fused-attn verify`, with times that do not depend on the machine."""

from __future__ import annotations

import pytest

from fused_attn.backends.registry import BACKENDS as REGISTERED
from fused_attn.backends.verdicts import ProblemClass
from fused_attn.tools import plan, timing
from fused_attn.tools.checks import AttentionCheck, NormCheck
from fused_attn.tools.plan import Plan

SMALL = {"ends": (32,), "tokens": 64, "hidden": 128, "cached": 64}
SHAPE = "2,4/2,21,37,16"


def small_plan(features=("none", "causal"), dtypes=("float32",)):
    """Return a plan of checks that take about a second, with small problems for `features`."""
    checks = [
        AttentionCheck(shape=SHAPE, result="lse"),
        AttentionCheck(shape=SHAPE, mask="causal"),
        AttentionCheck(shape=SHAPE, mask="causal+padding", bias="learned"),
        AttentionCheck(shape=SHAPE, dropout_p=0.3, how="bits"),
        AttentionCheck(shape=SHAPE, mask="causal", how="twice"),
        NormCheck(rows=9, columns=40, residual=True),
    ]
    probes = plan.attention_probes(dtypes, [32], **SMALL)
    classes = plan.by_class([*probes, *plan.norm_probes(dtypes, [256], elements=1024)])
    wanted = (*features, "plain")
    return Plan(checks, {n: p for n, p in classes.items() if n.feature in wanted}, rounds=1)


def class_named(feature, direction, length="L<=128"):
    return ProblemClass("attention", "float32", f"D<=32,{length}", feature, direction)


@pytest.fixture
def fast(monkeypatch):
    """Report half of torch's time for every backend that does not wrap torch."""

    def medians(ways, device, rounds):
        return {name: 1.0 if REGISTERED[name].differentiable else 0.5 for name in ways}

    monkeypatch.setattr(timing, "medians", medians)
