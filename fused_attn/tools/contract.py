"""The numerics contract: how far off a result may be, and a check of calls against it.

Against eager attention in float64, an output is at most OUTPUT_FACTOR times, a gradient at most
GRAD_FACTOR times as far off as eager attention in the same type, plus one rounding of the largest
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OUTPUT_FACTOR = 2.0
GRAD_FACTOR = 3.0
PEER_FACTOR = 10.0  # what is off by more than this many times eager's error is another problem


def errors(tensor: Tensor | None, reference: Tensor) -> tuple[float, float]:
    """Maximal and root mean square error where the reference is finite; inf for NaN."""
    if tensor is None:
        return math.inf, math.inf
    error = (tensor.to(reference.dtype) - reference)[reference.isfinite()].abs()
    if error.numel() == 0:
        return 0.0, 0.0
    error = error.nan_to_num(nan=math.inf, posinf=math.inf)
    return error.max().item(), error.square().mean().sqrt().item()


def largest(reference: Tensor) -> float:
    """The largest of the finite values."""
    finite = reference[reference.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def limit(factor: float, eager_error: float, largest_value: float, dtype: torch.dtype) -> float:
    """The error that the contract allows for a result in `dtype`."""
    return factor * eager_error + torch.finfo(dtype).eps * largest_value


@dataclass(frozen=True)
class Finding:
    """The largest error of an output or a gradient, and what the contract allows for it."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Verdict:
    """What `check` found.

    Attributes:
        findings: outputs first, then the gradients of the operands.
        agrees: whether the results of a peer are those of the same problem.
    """

    findings: list[Finding]
    agrees: Callable[[Any], bool]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def worst(self) -> Finding:
        """The finding that is closest to its limit, or furthest beyond."""
        return max(self.findings, key=lambda f: f.error / f.limit if f.limit else f.error)


def check(
    own: Callable[..., Any],
    eager: Callable[..., Any],
    operands: Mapping[str, Tensor],
    dtype: torch.dtype,
    gradients: bool,
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Verdict:
    """own(*operands) against eager(*operands) in float64 and in `dtype`.

    Args:
        own, eager: functions of the operands; their results are a tensor or several.
        operands: float tensors, by name.
        dtype: the type that own and eager run in.
        gradients: check the gradients of the operands too, those of a fixed random projection.
        part: the checked part of an operand, a result or a gradient, for problems whose scores
            eager attention cannot hold: own gets the whole, eager the part.

    Returns:
        An error and a limit for each result.
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

    devices = {t.device for t in operands.values() if t.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        got = [part(t) for t in run(own, operands.values(), dtype)]
        parts = [part(t) for t in operands.values()]
        truth, rounded = run(eager, parts, torch.float64), run(eager, parts, dtype)

    num_outs = len(got) - len(parts) if gradients else len(got)
    names = [f"out{i}" for i in range(num_outs)] if num_outs > 1 else ["out"]
    names += [f"grad {name}" for name in operands] if gradients else []
    findings = []
    for i, (name, t, e, g) in enumerate(zip(names, truth, rounded, got, strict=True)):
        factor = OUTPUT_FACTOR if i < num_outs else GRAD_FACTOR
        allowed = limit(factor, errors(e, t)[0], largest(t), dtype)
        findings.append(Finding(name, errors(g, t)[0], allowed))

    first = truth[0]
    peer_limit = PEER_FACTOR * limit(1.0, errors(rounded[0], first)[0], largest(first), dtype)

    def agrees(results: Any) -> bool:
        return errors(part(results_of(results)[0].detach()), first)[0] <= peer_limit

    return Verdict(findings, agrees)


def results_of(results: Any) -> list[Tensor]:
    """The tensors of a call that returns one or several."""
    return [results] if isinstance(results, Tensor) else list(results)
