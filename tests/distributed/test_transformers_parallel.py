"""Training of a transformers Llama on packed rows over several ranks, with and without Trainer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="reason: needs transformers")
pytest.importorskip("accelerate", reason="reason: needs accelerate")

from trainer_cases import STEPS, steps_of_one, steps_of_rank, trained, trained_by_ranks

pytestmark = pytest.mark.slow

SWAPS = pytest.mark.parametrize("swap", [False, True], ids=["sdpa", "swapped"])


@pytest.mark.parametrize(
    ("checkpoint", "method", "swap"),
    [
        (False, "ring", False),
        (True, "ring", True),
        (False, "all_to_all", True),
        (True, "all_to_all", False),
    ],
)
def test_training_steps(checkpoint, method, swap, ranks):
    """Losses and gradients equal those of one process that runs each document separately."""
    expected = steps_of_one(swap)
    for result in ranks.run(steps_of_rank, swap, checkpoint, method):
        assert len(result) == STEPS
        for step, truth in zip(result, expected, strict=True):
            assert step.keys() == truth.keys()
            for name, tensor in step.items():
                torch.testing.assert_close(tensor, truth[name], rtol=1e-9, atol=1e-11, msg=name)


@SWAPS
@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer(accumulated, swap, ranks, tmp_path):
    """Losses and weights equal those of a Trainer in one process."""
    expected = trained(str(tmp_path), swap, False, accumulated)
    results = ranks.run(trained_by_ranks, str(tmp_path), swap, accumulated)
    assert results[0]["losses"] and len(expected["losses"]) == STEPS // accumulated
    for result in results:
        if result["losses"]:  # Not all ranks log losses, which transformers computes in float32.
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-6, atol=0)
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=0, atol=1e-7)
