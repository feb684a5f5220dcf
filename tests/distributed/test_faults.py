"""Mistakes and failures of one rank are errors on all ranks, and never a hang."""

from __future__ import annotations

import pytest
from fault_cases import KINDS, error_of, survive, without_process_group
from processes import Processes

TIMEOUT = 2.0  # of the process group, in seconds

MISTAKES = {
    "mask": "attn_mask must be the same on all 4 ranks, got different tensors",
    "mask tensor": "attn_mask must be the same on all 4 ranks, got different tensors",
    "heads": "num_heads must be the same on all 4 ranks, got 4, 5, 4, 4",
    "scale": "scale, softcap and dropout_p must be the same on all 4 ranks",
    "positions": "positions of all ranks must be range(length)",
    "positions of one rank": "positions must be integers of shape",
    "sharding": "positions must be the same on all 4 ranks",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(mistake, kind, ranks):
    if kind == "decode" and (mistake == "scale" or "positions" in mistake or mistake == "sharding"):
        pytest.skip("reason: not an argument of it")
    for error in ranks.run(error_of, mistake, kind):
        assert error.startswith("ValueError") and MISTAKES[mistake] in error


@pytest.mark.parametrize("fault", ["dies", "stalls"])
def test_a_failing_rank_is_an_error_on_the_others(fault, tmp_path):
    """The other ranks raise within the timeout of the process group."""
    ranks = Processes(3, tmp_path, timeout=TIMEOUT)
    try:
        for traceback, result in ranks.outcomes(survive, "ring", fault, 2 * TIMEOUT)[:2]:
            assert not traceback
            message, seconds = result
            assert "Error" in message
            print(f"{fault}: after {seconds:.1f} s, {message[:100]}")
            assert seconds < 2 * TIMEOUT + 2
    finally:
        ranks.close()


def test_without_process_group():
    assert "call init_process_group" in without_process_group()
