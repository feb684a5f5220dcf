"""Tensor parallelism with gloo, compared with one process."""

from __future__ import annotations

import pytest
import tensor_parallel as calls
import tensor_parallel_modules as modules
import torch
from helpers import assert_contract
from processes import Processes

import fused_attn
from fused_attn.distributed import parallelize_plan

ROUNDING = 64 * torch.finfo(torch.float64).eps  # relative error of another summation order


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    pool = Processes(2, tmp_path_factory.mktemp("two"))
    yield pool
    pool.close()


def assert_equal(found):
    """Assert that the results of each rank equal those of one process up to float64 rounding.

    The tolerance is relative to the largest result, because the gradient of the key bias consists
    of rounding errors.
    """
    for of_rank in found:
        scale = max(float(want[want.isfinite()].abs().max()) for _, want in of_rank.values())
        for name, (got, want) in of_rank.items():
            assert got.shape == want.shape, name
            close = torch.isclose(got, want, rtol=0.0, atol=scale * ROUNDING)
            assert close.all(), f"{name}: {(got - want).abs().max()}"


@pytest.mark.parametrize("dropout_p", [0.0, calls.DROPOUT_P])
@pytest.mark.parametrize("placed", list(calls.PLACEMENTS))
def test_attention(placed, dropout_p, two):
    assert_equal(two.run(calls.attention, placed, dropout_p))


@pytest.mark.parametrize("placed", list(calls.PLACEMENTS))
def test_masks_that_are_dtensors(placed, two):
    assert_equal(two.run(calls.dtensor_masks, placed))


def test_masks_of_shards_are_cached(two):
    found = two.run(calls.cached_masks)
    assert all(cached for cached, _ in found)
    assert_equal([of_rank for _, of_rank in found])


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, calls.DROPOUT_P])
def test_norms(dropout_p, rms, two):
    assert_equal(two.run(calls.norms, dropout_p, rms))


@pytest.mark.parametrize(
    "function",
    [
        calls.redistributed, calls.compiled_calls, modules.attention_modules, modules.layers,
        modules.decoded, modules.hugging_face, modules.sequence_parallel, modules.checkpointed,
        modules.compiled,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_two_ranks(function, two):
    assert_equal(two.run(function))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contract(dtype, two):
    for of_rank in two.run(modules.of_type, dtype):
        for name, got, truth, eager in of_rank:
            assert_contract(name, got, truth, eager)


def test_fsdp(ranks):
    found = ranks.run(modules.fsdp, True)
    assert [error for _, error in found] == [""] * 4
    assert_equal([of_rank for of_rank, _ in found])


def test_fsdp_on_rows_has_no_state_dict(ranks):
    for _, error in ranks.run(modules.fsdp, False):
        assert "in_proj_weight must be sharded on columns by fully_shard" in error


def test_two_dimensional_mesh(ranks):
    assert_equal(ranks.run(calls.two_dimensions))


# ---- plans and errors ---------------------------------------------------------------------------


def test_plan():
    layer = fused_attn.nn.TransformerDecoderLayer(16, 4, 32)
    styles = {name: type(style).__name__ for name, style in parallelize_plan(layer).items()}
    assert styles == {
        "self_attn": "HeadwiseParallel",
        "multihead_attn": "HeadwiseParallel",
        "linear1": "ColwiseParallel",
        "linear2": "RowwiseParallel",
    }
    assert list(parallelize_plan(fused_attn.nn.MultiheadAttention(16, 4))) == [""]


def test_models_without_a_plan(two):
    for error in two.run(modules.gpt2_error):
        assert "h.0.attn.c_attn (Conv1D) projects query, key and value with one weight" in error
    with pytest.raises(ValueError, match="model must have attention or feed-forward modules"):
        parallelize_plan(torch.nn.Linear(3, 3))


def test_unsupported_modules(two):
    for errors in two.run(calls.refusals):
        for message, error in errors.items():
            assert message in error
