"""Gradients of 16-bit rows that see few keys, or one that has nearly all the weight.

`make peaked-rows` searches among many more of these problems.
"""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS, ISAS, SLOW_BACKENDS, runnable
from peaked_rows import Problem, problem

from fused_attn.backends import cpp

# Delta of an output rounded to 16 bits missed their limits by factors of 4.9, 2.2 and 2.2.
FOUND = [
    Problem(
        14, torch.bfloat16, (3, 4, 2, 33, 3, 96, 96),
        ("padding", "causal_bottom_right", "key_mask"), size=8.0, scale=0.3, dropout_p=0.0,
    ),
    *(
        Problem(
            number, torch.float16, (1, 2, 2, 2, 16, 256, 256), ("causal", "alibi"),
            size=1.0, scale=None, dropout_p=0.0,
        )
        for number in (15, 37)
    ),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("found", FOUND, ids=str)
def test_found(found, backend):
    for finding in found.findings(backend):
        assert finding.ok, str(finding)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sample(backend):
    for number in range(4 if backend in SLOW_BACKENDS else 200):
        own = problem(number)
        finding = own.judge(backend)
        assert finding.ok, f"{own}: {finding}"


@pytest.mark.parametrize("isa", ISAS)
def test_isas(isa):
    if not runnable(isa):
        pytest.skip(f"reason: this CPU has no {isa}")
    with cpp.use_isa(isa):
        for number in range(200, 260):
            own = problem(number)
            finding = own.judge("cpp")
            assert finding.ok, f"{own}: {finding}"
