"""Checked before it is timed: the numerics contract of the package, as in tests/helpers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import fused_attn
from fused_attn.compare import GRAD_FACTOR, OUTPUT_FACTOR


def check(
    name: str, dtype: torch.dtype, call: Callable[..., Tensor], operands: Iterable[Tensor],
    gradients: bool,
) -> None:  # fmt: skip
    """call(*operands), and its gradients, against eager attention in float64 and in `dtype`."""
    operands = list(operands)

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        own = [t.detach().to(dtype).requires_grad_(gradients) for t in operands]
        torch.manual_seed(0)  # the same dropout everywhere
        with torch.set_grad_enabled(gradients), fused_attn.use_backend(backend):
            out = call(*own)
        if not gradients:
            return [out]
        return [out, *torch.autograd.grad(out.float().square().sum(), own)]

    truth, eager, got = run(torch.float64, "eager"), run(dtype, "eager"), run(dtype, "cpp")
    for i, (t, e, g) in enumerate(zip(truth, eager, got, strict=True)):
        factor = OUTPUT_FACTOR if i == 0 else GRAD_FACTOR
        allowed = factor * (e.double() - t).abs().max()
        allowed = allowed + t.abs().max() * torch.finfo(dtype).eps
        assert (g.double() - t).abs().max() <= allowed, f"result {i} of {name} is wrong"
