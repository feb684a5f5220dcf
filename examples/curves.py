"""Loss curves of a training on two backends, compared with the same training in float64.

Training amplifies rounding errors. After 200 steps, two correct float32 trainings can differ in the
third digit, by an amount that depends on the CPU. The fused and the eager training are therefore
both compared with float64. "Twins" of the eager training, whose initial weights differ by one
rounding error, show how far a correct float32 training deviates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import common
import torch
from terminal import console
from torch.nn import Module

import fused_attn

Prepare = Callable[[Module], Module]
Train = Callable[[Prepare], list[float]]

TWINS = 2
# Factor over the largest deviation of three correct trainings. Measured over 100 steps on an AMD
# EPYC, maximum deviations of correct trainings (eager, fused, twins of both) range from 5.8e-5 to
# 1.3e-4 in translate.py (a factor of 2.2) and from 2.5e-7 to 1.5e-6 in gpt.py (a factor of 6.1).
# Mean deviations vary less. 8 exceeds both factors. Training amplifies a fault as it amplifies
# rounding errors: scores with a relative error of 1e-4 exceed the limit.
FACTOR = 8.0
ROUNDING = 2.0**-23  # relative rounding error of a float32 loss


class Deviation(NamedTuple):
    """Relative loss deviation, |loss - reference| / |reference|, over the steps of a training."""

    mean: float
    max: float


def as_is(model: Module) -> Module:
    return model


def in_float64(model: Module) -> Module:
    return model.double()


def twin(seed: int) -> Prepare:
    """Return a function that moves each weight to one of its two adjacent float32 values."""

    @torch.no_grad()
    def prepare(model: Module) -> Module:
        generator = torch.Generator().manual_seed(seed)  # do not advance the default generator
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(weight.nextafter(torch.where(up, torch.inf, -torch.inf)))
        return model

    return prepare


def deviation(losses: Sequence[float], reference: Sequence[float]) -> Deviation:
    each = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return Deviation(sum(each) / len(each), max(each))


def limit(correct: Sequence[Deviation]) -> Deviation:
    """Return the largest permitted deviation, given the deviations of correct trainings."""
    return Deviation(*(FACTOR * max(values) + ROUNDING for values in zip(*correct, strict=True)))


def compare(run: common.Example, train: Train) -> dict[str, list[float]]:
    """Require that a training on the run's backend deviates from float64 within `limit`.

    The limit follows from the deviations of the eager training and its twins.

    Args:
        train: builds a model without dropout, applies the given function to it, trains the result
            and returns the loss of each step. The function must use only torch's default generator,
            and its random numbers must not depend on the dtype of the weights.

    Returns:
        The losses of the run's backend ("fused") and of eager; empty if the run's backend is eager.
    """
    if run.backend == "eager":
        console.print("\nLoss curves are not compared: this run is on the reference itself")
        return {}
    twins = {f"eager, twin {i}": ("eager", twin(i)) for i in range(1, TWINS + 1)}
    trainings = {
        "float64": ("eager", in_float64),
        "fused": (run.backend, as_is),
        "eager": ("eager", as_is),
        **twins,
    }
    losses = {}
    # Preserve the random state, so that the comparison does not affect the rest of the run.
    with torch.random.fork_rng(devices=[]):
        for name, (backend, prepare) in trainings.items():
            console.print(f"\nWithout dropout: {name}")
            with fused_attn.use_backend(backend):
                torch.manual_seed(run.seed)
                losses[name] = train(prepare)
    reference = losses.pop("float64")
    found = {name: deviation(values, reference) for name, values in losses.items()}
    fused, eager = found["fused"], found["eager"]
    most = limit([eager, *(found[name] for name in twins)])
    holds = fused.mean <= most.mean and fused.max <= most.max
    run.require(
        holds,
        f"losses of {len(reference)} steps without dropout may deviate from training in float64 "
        f"{FACTOR:g} times as much as those of eager and its twins: mean {fused.mean:.1e} must be "
        f"<= {most.mean:.1e} (eager {eager.mean:.1e}), maximum {fused.max:.1e} <= {most.max:.1e} "
        f"(eager {eager.max:.1e})",
    )
    run.figures["curves"] = {
        "steps": len(reference),
        "holds": holds,
        "deviations": {name: value._asdict() for name, value in found.items()},
    }
    return {"fused": losses["fused"], "eager": losses["eager"]}
