"""Wrong arguments or a failure of one rank raise an error on all ranks; none hangs."""

from __future__ import annotations

import pytest
import torch
from fault_cases import KINDS, error_of, survive, with_cold_caches
from processes import Processes

from fused_attn.distributed import ring_attention

TIMEOUT = 2.0  # seconds, for collectives of the process group

# Mistake of rank 1 -> the error on all ranks, or (the error on rank 1, the error on the others).
MISTAKES = {
    "mask": "attn_mask must be the same on all 4 ranks, got different values",
    "mask tensor": "attn_mask must be the same on all 4 ranks, got different values",
    "second call": "attn_mask must be the same on all 4 ranks, got different values",
    "dtype": "dtype must be the same on all 4 ranks, got torch.float16, torch.bfloat16",
    "gradient": "requires_grad of query, key and value must be the same on all 4 ranks",
    "seed": "seed must be the same on all 4 ranks, got 0, 1, 0, 0",
    "heads": "num_heads must be the same on all 4 ranks, got 4, 5, 4, 4",
    "scale": "scale, softcap and dropout_p must be the same on all 4 ranks",
    "positions": "positions of all ranks must together be range(length)",
    "positions of one rank": (
        "positions must be an integer tensor of shape",
        "arguments of rank 1 are invalid",
    ),
    "rows": ("query must have 8 rows on rank 1", "arguments of rank 1 are invalid"),
    "sharding": "positions must be the same on all 4 ranks",
}
NOT_IN_DECODING = (
    "positions", "positions of one rank", "sharding", "rows", "gradient", "seed", "scale",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(mistake, kind, ranks):
    if kind == "decode" and mistake in NOT_IN_DECODING:
        pytest.skip("reason: decoding has no such argument")
    expected = MISTAKES[mistake]
    wrong, others = (expected, expected) if isinstance(expected, str) else expected
    for rank, error in enumerate(ranks.run(error_of, mistake, kind)):
        assert error.startswith("ValueError")
        assert (wrong if rank == 1 else others) in error


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_different_caches(kind, ranks):
    """Calls neither fail nor hang if the ranks have cached different parts of the mask."""
    ranks.run(with_cold_caches, kind)


@pytest.mark.parametrize("fault", ["dies", "stalls"])
def test_a_failing_rank_is_an_error_on_the_others(fault, tmp_path):
    ranks = Processes(3, tmp_path, timeout=TIMEOUT)
    try:
        for traceback, result in ranks.outcomes(survive, "ring", fault, 2 * TIMEOUT)[:2]:
            assert not traceback
            message, seconds = result
            assert "Error" in message
            assert seconds < 2 * TIMEOUT + 2
    finally:
        ranks.close()


def test_without_process_group():
    query = torch.randn(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="call init_process_group"):
        ring_attention(query, query, query)
