"""Training with sequences distributed over four ranks matches one process in float64."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from context_cases import (
    batch_of,
    loss_of,
    message_of,
    model_of,
    squares,
    step_of_rank,
    step_of_style,
    step_of_three,
    transformer,
    unshard_gradient,
)

import fused_attn
from fused_attn import masks
from fused_attn.distributed import Sharding

LENGTH = 45
IDS = torch.arange(LENGTH) * 3 // LENGTH
MASKS = {
    "none": None,
    "documents": masks.documents(torch.stack([IDS, IDS.flip(0)])),
    "window": masks.sliding_window(11, 0),
    "padding": masks.padding(torch.tensor([LENGTH, 17])),
}


def expected(mask):
    """Return logits, loss and gradients of one process, whose attention calls use the mask."""
    model = model_of(False)
    tokens, labels, positions = batch_of(LENGTH)
    attention = functools.partial(fused_attn.scaled_dot_product_attention, attn_mask=mask)
    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        logits = model(tokens, positions)
        loss = loss_of(logits, labels, tokens.numel())
        loss.backward()
    return {
        "logits": logits.detach(),
        "loss": loss.detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def assert_equal(results, mask):
    truth = expected(mask)
    for result in results:
        assert result.keys() == truth.keys()
        for name, tensor in result.items():
            torch.testing.assert_close(tensor, truth[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("method", "mesh", "fused"),
    [
        ("ring", (4,), False),
        ("ring", (4,), True),
        ("all_to_all", (4,), False),
        ("auto", (2, 2), True),
    ],
)
@pytest.mark.parametrize("name", MASKS)
def test_training_step(name, method, mesh, fused, ranks):
    if fused and name == "none":
        pytest.skip("reason: fused modules pass a mask, so context_parallel needs mask=")
    balancers = {"window": None, "documents": "balanced"}
    balancer = balancers.get(name, Sharding.of_lengths([20, 3, 21, 1]))
    results = ranks.run(step_of_rank, fused, LENGTH, mesh, MASKS[name], method, balancer)
    assert_equal(results, MASKS[name])


@pytest.mark.parametrize(
    ("fused", "mode"),
    [
        (False, "checkpoint"),
        (True, "checkpoint"),
        (True, "compile"),
        pytest.param(False, "compile", marks=pytest.mark.thorough),
    ],
)
def test_checkpointed_and_compiled(fused, mode, ranks):
    args = (fused, LENGTH, (4,), MASKS["documents"], "ring", "contiguous", mode)
    assert_equal(ranks.run(step_of_rank, *args), MASKS["documents"])


@pytest.mark.parametrize("checkpoint", ["", "reentrant", "not reentrant"])
def test_parallel_style(checkpoint, ranks):
    results = ranks.run(step_of_style, LENGTH, MASKS["padding"], checkpoint)
    assert_equal(results, MASKS["padding"])


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_unshard_is_differentiable(mesh, ranks):
    for grad in ranks.run(unshard_gradient, 16, mesh):
        torch.testing.assert_close(grad, 2.0 * torch.arange(48.0).view(1, 16, 3))


@pytest.mark.parametrize(
    ("case", "expected_message"),
    [
        ("view", "buffers must not be a view"),
        ("lengths", "buffers must have equal sequence lengths"),
        ("balancer", "load_balancer must distribute 16 positions over 4 ranks"),
        ("mask", "attn_mask must be None under context_parallel"),
        ("rows", "key must have 4 rows on rank"),
        ("mask of a buffer", "mask must not share memory with a buffer"),
        ("weights", "attention weights are not available under context_parallel"),
    ],
)
def test_errors_on_every_rank(case, expected_message, ranks):
    for message in ranks.run(message_of, case):
        assert expected_message in message


def test_a_mask_on_one_rank_is_an_error_on_all(ranks):
    # transformers builds masks from position_ids, only on ranks where a document starts.
    for rank, message in enumerate(ranks.run(message_of, "mask of one rank")):
        assert ("attn_mask must be None" if rank == 2 else "rank 2 are invalid") in message


@pytest.mark.parametrize(
    ("mode", "dropout"),
    [("", False), ("", True), pytest.param("compile", False, marks=pytest.mark.thorough)],
)
def test_context_tensor_and_data_parallel(mode, dropout, ranks):
    """Training with context, tensor and data parallelism on 2 x 2 ranks matches one process."""
    mask = MASKS["window"] if dropout else masks.causal() & masks.documents(torch.arange(13) // 5)
    model = transformer().train(dropout)
    for layer in model.layers:
        layer.self_attn.dropout = 0.5 if dropout else 0.0
    x = torch.randn(2, 13, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    squares(model, x, mask).backward()
    optimizer.step()
    for state in ranks.run(step_of_three, mask, mode, dropout):
        for name, want in model.state_dict().items():
            torch.testing.assert_close(state[name], want, rtol=1e-10, atol=1e-10, msg=name)
