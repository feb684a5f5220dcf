"""The error limit of the numerics contract, applied to single tensors."""

import math

import pytest
import torch

from fused_attn.tools import contract

TRUTH = torch.tensor([[1.0, -2.0], [0.5, 0.25]], dtype=torch.float64)
EAGER = TRUTH.float() + 1e-3


def judge(got, truth=TRUTH, eager=EAGER):
    return contract.judge("out", got, truth, eager, gradient=False)


@pytest.mark.parametrize("off", [2.1e-3, -2.1e-3, math.nan, math.inf])
def test_the_position_of_the_largest_error_is_reported(off):
    got = TRUTH.float()
    got[1, 0] += off
    finding = judge(got)
    assert not finding.ok
    assert "at (1, 0)" in str(finding) and "truth 0.5)" in str(finding)
    got[1, 0] = 0.5 + 1.9e-3
    assert judge(got).ok


def test_infinities_must_agree():
    truth, eager = TRUTH.clone(), EAGER.clone()
    truth[0, 0] = eager[0, 0] = -math.inf
    assert judge(eager, truth, eager).ok
    assert not judge(EAGER, truth, eager).ok
    eager[0, 0] = math.inf
    assert not judge(eager, truth, eager).ok


def test_shapes_must_agree():
    finding = judge(EAGER[:1])
    assert not finding.ok and "shape (1, 2), not (2, 2)" in str(finding)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_errors_are_not_allowed_where_eager_overflows(bad):
    assert not judge(EAGER, eager=torch.full_like(EAGER, bad)).ok


def test_empty_tensors_are_within_the_limit():
    empty = torch.empty(0, 2)
    assert judge(empty, empty.double(), empty).ok
