"""Checked before it is timed: the numerics contract of the package, as in tests/helpers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import fused_attn
from fused_attn.compare import GRAD_FACTOR, OUTPUT_FACTOR

_PEER_FACTOR = 10.0  # a peer that is off by more than this computes something else


def check(
    name: str, dtype: torch.dtype, call: Callable[..., Tensor], operands: Iterable[Tensor],
    gradients: bool,
) -> None:  # fmt: skip
    """call(*operands), and its gradients, against eager attention in float64 and in `dtype`."""

    def by(backend: str) -> Callable[..., Tensor]:
        def run(*own: Tensor) -> Tensor:
            with fused_attn.use_backend(backend):
                return call(*own)

        return run

    check_part(name, dtype, by("cpp"), by("eager"), list(operands), gradients)


def check_part(
    name: str,
    dtype: torch.dtype,
    own: Callable[..., Any],
    eager: Callable[..., Any],
    operands: Sequence[Tensor],
    gradients: bool,
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Callable[[Any], bool]:
    """own(*operands), which is what is timed, in a part that eager attention can hold.

    Args:
        own, eager: functions of the operands; their results are a tensor or a tuple of them.
        part: the checked part of an operand, a result or a gradient.

    Returns:
        Whether a peer's results are those of the same problem; all of them, not the part.
    """

    weights: list[Tensor] = []  # gradients of the results, whole

    def run(call: Callable[..., Any], tensors: Iterable[Tensor], dtype: torch.dtype) -> list:
        leaves = [t.detach().to(dtype).requires_grad_(gradients) for t in tensors]
        torch.manual_seed(0)  # the same dropout everywhere
        with torch.set_grad_enabled(gradients):
            outs = results_of(call(*leaves))
        if not gradients:
            return outs
        if not weights:
            weights.extend(torch.randn_like(out) for out in outs)
        whole = outs[0].shape == weights[0].shape
        grads = [(w if whole else part(w)).to(outs[0].dtype) for w in weights]
        return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]

    got = [part(t) for t in run(own, operands, dtype)]
    parts = [part(t) for t in operands]
    truth, rounded = run(eager, parts, torch.float64), run(eager, parts, dtype)
    num_outs = len(got) - len(parts) if gradients else len(got)

    def limits(factor: float, t: Tensor, e: Tensor) -> Tensor:
        allowed = factor * (e.double() - t).abs().max()
        return allowed + t.abs().max() * torch.finfo(dtype).eps

    for i, (t, e, g) in enumerate(zip(truth, rounded, got, strict=True)):
        limit = limits(OUTPUT_FACTOR if i < num_outs else GRAD_FACTOR, t, e)
        worst = (g.double() - t).abs().max()
        assert worst <= limit, (
            f"result {i} of {name} is wrong: {worst:.3e} off, {limit:.3e} allowed"
        )

    first, limit = truth[0], _PEER_FACTOR * limits(1.0, truth[0], rounded[0])

    def agrees(results: Any) -> bool:
        out = part(results_of(results)[0].detach())
        return bool((out.double() - first).abs().max() <= limit)

    return agrees


def results_of(results: Any) -> list[Tensor]:
    """The tensors of a call that returns one or several."""
    return [results] if isinstance(results, Tensor) else list(results)
