"""examples/curves.py on a tiny model: loss curves of two backends, compared with float64."""

from pathlib import Path

import pytest
import torch
from example_runs import EXAMPLES  # noqa: F401  # adds examples/ to sys.path

import fused_attn
from fused_attn.backends import wanted_backend

# isort: split
import common
import curves

STEPS = 30


def training(prepare: curves.Prepare, fault: float = 0.0) -> list[float]:
    """Train a small attention layer, and return the loss of each step.

    On all backends except eager, queries are scaled by 1 + fault.
    """
    model = prepare(torch.nn.Linear(8, 24))
    x = torch.randn(4, 1, 9, 8).to(model.weight.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        query, key, value = model(x).chunk(3, -1)
        if wanted_backend() != "eager":
            query = query * (1.0 + fault)
        out = fused_attn.scaled_dot_product_attention(query, key, value)
        loss = (out - x.flip(2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def example(folder: Path, backend: str = "cpp") -> common.Example:
    return common.Example("example", smoke=False, seed=0, output=folder, backend=backend)


def test_a_correct_backend_holds(tmp_path):
    run, before = example(tmp_path), torch.get_rng_state()
    pair = curves.compare(run, training)
    assert torch.get_rng_state().equal(before)  # later random numbers do not change
    assert [len(losses) for losses in pair.values()] == [STEPS, STEPS]
    assert [shown["holds"] for shown in run.shown] == [True]
    recorded = run.figures["curves"]
    assert recorded["holds"] and recorded["steps"] == STEPS
    assert list(recorded["deviations"]) == ["fused", "eager", "eager, twin 1", "eager, twin 2"]
    assert all(0.0 < found["max"] < 1e-5 for found in recorded["deviations"].values())


@pytest.mark.parametrize("fault", [1e-2, 1e-3, 1e-4])
def test_a_wrong_backend_does_not_hold(tmp_path, fault):
    run = example(tmp_path)
    curves.compare(run, lambda prepare: training(prepare, fault))
    assert [shown["holds"] for shown in run.shown] == [False]
    assert not run.figures["curves"]["holds"]


def test_a_run_on_eager_is_not_compared(tmp_path):
    run = example(tmp_path, "eager")
    assert curves.compare(run, training) == {} and not run.shown and not run.figures


def test_twins_differ_by_one_rounding():
    model = torch.nn.Linear(20, 20)
    weight, before = model.weight.detach().clone(), torch.get_rng_state()
    one, other = (curves.twin(seed)(torch.nn.Linear(20, 20)) for seed in (1, 2))
    torch.set_rng_state(before)
    assert not one.weight.equal(other.weight)

    moved = curves.twin(1)(model).weight
    assert torch.get_rng_state().equal(before)
    above, below = (weight.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    assert ((moved == above) | (moved == below)).all()
    assert not moved.equal(above) and not moved.equal(below)
