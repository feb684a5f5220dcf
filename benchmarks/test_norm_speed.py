"""Benchmark of norms against torch's norms, composed with dropout and a residual sum if needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import ways
from runner import Runner, checked
from shapes import NORMS, Norm, cases
from torch import Tensor


@pytest.mark.parametrize(("shape", "dtype", "group"), cases(NORMS))
def test_norm(shape: Norm, dtype: torch.dtype, group: str, runner: Runner) -> None:
    passes = group.removeprefix("norm ")
    backward = passes == "backward"

    def operands(seed: int) -> list[Tensor]:
        tensors = ways.norm_operands(shape, dtype, runner.device, seed)
        return [t.requires_grad_(backward) for t in tensors]

    sets = runner.sets(operands)
    own, eager = (ways.norm(shape, backend) for backend in (runner.backend, "eager"))

    def check() -> Callable[[Any], bool] | None:
        agrees = checked(shape.name, own, eager, sets[0], dtype, backward)
        return agrees if shape.dropout_p == 0.0 else None

    runner.run(
        group, shape, dtype, own, ways.norm_peers(shape, gpu=runner.gpu), sets, check,
        passes=passes, work={"bytes": shape.streams(backward) * sets[0][0].nbytes},
    )  # fmt: skip
