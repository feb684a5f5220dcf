"""Benchmarks of attention, decoding and packing against torch, FlexAttention and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import ways
from runner import FLOPS, Check, Runner, checked
from shapes import BACKWARD, CALL, DECODE, FORWARD, PACKED, TRAINING, Attention, cases
from torch import Tensor


def attention(
    runner: Runner,
    group: str,
    shape: Attention,
    dtype: torch.dtype,
    passes: str = "forward",
    **options: Any,
) -> None:
    gradients, device = passes != "forward", runner.device

    def operands(seed: int) -> list[Tensor]:
        return [t.requires_grad_(gradients) for t in shape.operands(dtype, device, seed)]

    own, sets = ways.attention(shape, runner.backend, device), runner.sets(operands)
    peers = ways.attention_peers(shape, dtype, runner.backend, device, gpu=runner.gpu)
    runner.run(
        group, shape, dtype, own, peers, sets, attention_check(shape, dtype, own, sets[0], device),
        passes=passes, **options,
    )  # fmt: skip


def attention_check(
    shape: Attention, dtype: torch.dtype, own: ways.Way, operands: Any, device: ways.Device
) -> Check:
    """Return a check of the problem, reduced to a part that is small enough for eager attention."""
    gradients = operands[0].requires_grad

    def check() -> Callable[[Any], bool] | None:
        eager, part = ways.eager_part(shape, device)
        agrees = checked(shape.name, own, eager, operands, dtype, gradients, part)
        return agrees if shape.dropout_p == 0.0 and shape.softcap is None else None

    return check


@pytest.mark.parametrize(("shape", "dtype"), cases(FORWARD))
def test_forward(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    attention(runner, "forward", shape, dtype, work=runner.work(shape, "forward"))


@pytest.mark.parametrize(("shape", "dtype"), cases(DECODE))
def test_decode(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    attention(runner, "decode", shape, dtype, work={"bytes": shape.size.key_bytes(dtype)})


@pytest.mark.parametrize(("shape", "dtype"), cases(CALL))
def test_call(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    """Measure the host time of a call, which exceeds the time of its kernel."""
    attention(runner, "call", shape, dtype, work={}, of_host=True)


@pytest.mark.parametrize(("shape", "dtype", "group"), cases(PACKED))
def test_packed(shape: Attention, dtype: torch.dtype, group: str, runner: Runner) -> None:
    """Measure a packed batch. On a CPU, measure a training step against the padded batch."""
    passes = group.removeprefix("packed").strip() or "both"
    cu_seqlens = shape.packed(dtype, runner.device)[1]

    def operands(seed: int) -> list[Tensor]:
        rows = shape.packed(dtype, runner.device, seed)[0]
        return [t.requires_grad_(passes != "forward") for t in rows]

    sets = runner.sets(operands)
    own, eager = (ways.packed(shape, backend, cu_seqlens) for backend in (runner.backend, "eager"))

    def check() -> Callable[[Any], bool]:
        gradients = passes != "forward"
        return checked(shape.name, own, eager, sets[0], dtype, gradients, lambda t: t[:, :1])

    pairs = shape.size.num_heads * float(shape.lengths().square().sum())
    peers = ways.packed_peers(shape, dtype, cu_seqlens, runner.device, gpu=runner.gpu)
    runner.run(
        group, shape, dtype, own, peers, sets, check, passes=passes,
        work={"flops": FLOPS[passes] * 4.0 * pairs * shape.size.head_dim},
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), cases(BACKWARD))
def test_backward(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    work = runner.work(shape, "backward")
    attention(runner, "backward", shape, dtype, "backward", work=work)


@pytest.mark.parametrize(("shape", "dtype"), cases(TRAINING))
def test_training(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    """Measure a forward plus backward, with dropout or with the gradient of a bias."""
    attention(runner, "training", shape, dtype, "both", work=runner.work(shape, "both"))
