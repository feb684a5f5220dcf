"""Training code of the examples: AdamW loop, learning rates, loss curves and F1 score."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from terminal import progress
from torch import Tensor

from fused_attn.tools import doctor

_FAST_BFLOAT16 = ("amx", "amx_fp16", "avx512_bf16")  # instruction sets with bfloat16 matmuls
COLORS = {"fused": "tab:blue", "eager": "tab:gray", "other": "tab:orange"}


def train(
    parameters: Iterable[Tensor],
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    schedule: Callable[[int], float],
    title: str,
    *,
    weight_decay: float = 0.01,
    max_norm: float = 1.0,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train with one AdamW step per batch; return the losses.

    Args:
        parameters: parameters to train, of which those that require grad are updated.
        loss: returns the loss of a batch.
        schedule: returns the learning rate of a step, counted from 1.
        max_norm: upper bound to which the gradient norm is clipped.
        after: callback that receives the step number after each step, for example to validate.
    """
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.98), weight_decay=weight_decay)
    losses = []
    for step, batch in enumerate(progress(batches, title, lambda: losses[-1:]), 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        value = loss(batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        after(step)
    return losses


def mixed_precision() -> torch.autocast:
    """Return an autocast to bfloat16, which is enabled if the CPU has instructions for it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=doctor.machine()["isa"] in _FAST_BFLOAT16)


def inverse_sqrt(peak: float, warmup: int) -> Callable[[int], float]:
    """Return linear warm-up to `peak`, then 1 / sqrt(step) decay (Vaswani et al. 2017, eq. 3)."""
    return lambda step: peak * min(step / warmup, math.sqrt(warmup / step))


def cosine(peak: float, warmup: int, steps: int) -> Callable[[int], float]:
    """Return linear warm-up to `peak`, then cosine decay to 0 at `steps`."""

    def rate(step: int) -> float:
        done = max(0, step - warmup) / max(1, steps - warmup)
        return peak * min(step / warmup, 0.5 * (1 + math.cos(math.pi * done)))

    return rate


def smoothed(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """Return the exponential moving average of values, with bias correction."""
    sums = itertools.accumulate(
        values, lambda mean, value: weight * mean + (1 - weight) * value, initial=0.0
    )
    return [mean / (1 - weight**i) for i, mean in enumerate(sums) if i]


def plot_curves(axis: Any, curves: dict[str, list[float]], title: str) -> None:
    """Plot losses by step. The second curve is dotted, so that both stay visible."""
    for (name, losses), style in zip(curves.items(), ("-", ":"), strict=False):
        axis.plot(losses, style, color=COLORS.get(name, COLORS["other"]), label=name)
    axis.set(title=title, xlabel="step", ylabel="loss (nats)")
    if curves:
        axis.legend()


def macro_f1(labels: Tensor, predicted: Tensor) -> float:
    """Return the unweighted mean of F1 over the labels that occur in `labels`."""
    scores = []
    for label in labels.unique():
        hits = ((labels == label) & (predicted == label)).sum()
        scores.append(2 * hits / ((labels == label).sum() + (predicted == label).sum()))
    return torch.stack(scores).mean().item()
