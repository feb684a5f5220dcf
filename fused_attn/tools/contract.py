"""The numerics contract: limits on the error of a result, and checks of results against them.

Errors are measured against a reference of higher precision. The error of an output is at most
OUTPUT_FACTOR times, and that of a gradient at most GRAD_FACTOR times, the error of eager attention
in the same dtype, plus one rounding of the largest value. The error of eager attention is the
maximum of its measured error and its expected error on that problem (rounding.py), so that no
verdict depends on the BLAS of one CPU or on chance. The package's tools, the tests and the
benchmarks all use this rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_attn.tools.rounding import RUNS, Expected

OUTPUT_FACTOR = 2.0
GRAD_FACTOR = 3.0
PEER_FACTOR = 10.0  # a peer with more than 10 times eager's error computes another problem


def factor_of(gradient: bool) -> float:
    """Return the factor by which an error may exceed eager's; gradients have a larger factor."""
    return GRAD_FACTOR if gradient else OUTPUT_FACTOR


def limit(factor: float, eager_error: float, largest_value: float, dtype: torch.dtype) -> float:
    """Return the maximum error that the contract allows for a result in `dtype`."""
    numbers = torch.finfo(dtype)
    return factor * eager_error + numbers.eps * max(largest_value, numbers.smallest_normal)


def errors(
    tensor: Tensor | None, reference: Tensor, residual: Tensor | None = None
) -> tuple[float, float]:
    """Return the maximum and root mean square error over elements with a finite reference.

    NaN elements and a missing tensor count as infinite errors.

    Args:
        residual: higher-precision reference minus `reference`; None if `reference` is exact enough.
    """
    if tensor is None:
        return math.inf, math.inf
    count = int(reference.isfinite().sum())
    if count == 0:
        return 0.0, 0.0
    error = _deviation(tensor, reference, residual)
    return error.max().item(), math.sqrt(error.square().sum().item() / count)


def largest(reference: Tensor) -> float:
    """Return the largest magnitude of the finite elements; 0 if there are none."""
    finite = reference[reference.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _deviation(tensor: Tensor, reference: Tensor, residual: Tensor | None) -> Tensor:
    """Return the absolute error per element: 0 where the reference is not finite, inf for NaN."""
    error = tensor.to(reference.dtype) - reference
    if residual is not None:
        error = error - residual
    error = error.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return error.masked_fill(~reference.isfinite(), 0.0)


# Function that returns the expected error of eager attention, given the error at which the search
# may stop (`Expected.error`).
ExpectedError = Callable[[float], float]


def no_error(needed: float) -> float:
    """Return 0 as the expected error, so that only the measured error counts."""
    return 0.0


def allowed(
    error: float,
    eager_error: float,
    factor: float,
    largest_value: float,
    dtype: torch.dtype,
    expected: ExpectedError,
) -> tuple[float, float]:
    """Return the limit on an error, and the error of eager attention that the limit is based on.

    `expected` is called only if the limit from the measured eager error is below `error`.
    """
    most = limit(factor, eager_error, largest_value, dtype)
    if most < error < math.inf and math.isfinite(eager_error):
        rounding = limit(0.0, 0.0, largest_value, dtype)
        expected_error = expected((error - rounding) / factor)
        if expected_error > eager_error:
            return limit(factor, expected_error, largest_value, dtype), expected_error
    return most, eager_error


@dataclass(frozen=True)
class Finding:
    """Largest error of an output or a gradient, and the error that the contract allows.

    Attributes:
        name: name of the result.
        error: maximum absolute error.
        limit: maximum error that the contract allows.
        where: text with the position of the error and the values behind the limit.
    """

    name: str
    error: float
    limit: float
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit < math.inf

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3e}{self.where}"


def judge(
    name: str,
    got: Tensor,
    truth: Tensor,
    eager: Tensor,
    *,
    gradient: bool,
    residual: Tensor | None = None,
    expected: ExpectedError = no_error,
) -> Finding:
    """Return a finding with the largest error of `got` and its limit.

    Args:
        truth: result of eager attention in float64. Where it is not finite, `got` must be equal.
        eager: result of eager attention in the dtype of `got`.
        gradient: True if `got` is a gradient, which has a larger limit than an output.
        residual: higher-precision truth minus the float64 truth; needed if `got` is float64.
        expected: returns the expected error of eager attention. It is called only if the limit
            from the measured error is below the error of `got`.
    """
    if got.shape != truth.shape:
        return Finding(name, math.inf, 0.0, f": shape {tuple(got.shape)}, not {tuple(truth.shape)}")
    truth = truth.double()
    undefined = ~truth.isfinite()
    if not torch.equal(got[undefined].double(), truth[undefined]):
        return Finding(name, math.inf, 0.0, ": infinities differ")
    eager_error, factor = errors(eager, truth, residual)[0], factor_of(gradient)
    error = _deviation(got, truth, residual)
    if error.numel() == 0:
        return Finding(name, 0.0, 0.0)
    at = tuple((error == error.max()).nonzero()[0].tolist())
    most, by = allowed(error[at].item(), eager_error, factor, largest(truth), got.dtype, expected)
    whose = "eager" if by == eager_error else "expected of eager"
    return Finding(
        name, error[at].item(), most,
        f" at {at} (got {got[at].item():.8g}, truth {truth[at].item():.8g}); allowed "
        f"{most:.3e} = {factor:g} x {by:.3e} ({whose}) + a rounding",
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Findings of `check` on all results of a call.

    Attributes:
        findings: one per result: outputs first, then the gradients of the operands.
        agrees: returns True if a peer computed the same problem, that is, if the error of its first
            result is at most PEER_FACTOR times the sum of eager's error and one rounding.
    """

    findings: list[Finding]
    agrees: Callable[[Any], bool]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def worst(self) -> Finding:
        return worst(self.findings)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding that is closest to its limit, or exceeds it most."""
    return max(findings, key=lambda f: f.error / f.limit if f.limit else f.error)


def check(
    own: Callable[..., Any],
    eager: Callable[..., Any],
    operands: Mapping[str, Tensor],
    dtype: torch.dtype,
    gradients: bool,
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    runs: int = RUNS,
) -> Verdict:
    """Check own(*operands) in `dtype` against eager(*operands) in float64 and in `dtype`.

    Args:
        own, eager: functions of the operands that return one or several tensors.
        operands: float tensors by name.
        dtype: dtype in which own and eager run.
        gradients: also check the operands' gradients, namely those of a fixed random projection.
        part: slices an operand, a result or a gradient to the part that is checked, for problems
            whose scores do not fit in memory with eager attention. own computes the full problem,
            eager the part.
        runs: upper bound on the number of eager runs that estimate its expected error.

    Returns:
        A verdict with one finding per result.
    """
    weights: list[Tensor] = []  # gradients with respect to the full results

    def run(call: Callable[..., Any], tensors: Iterable[Tensor], dtype: torch.dtype) -> list:
        leaves = [t.detach().to(dtype).requires_grad_(gradients) for t in tensors]
        torch.manual_seed(0)  # the same dropout in every run
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
        expected = Expected(
            lambda dtype: dict(zip(names, run(eager, parts, dtype), strict=True)),
            dict(zip(names, truth, strict=True)),
            dtype,
            most=runs,
        )
        findings = [
            judge(
                name,
                g,
                t,
                e,
                gradient=i >= num_outs,
                expected=functools.partial(expected.error, name),
            )
            for i, (name, t, e, g) in enumerate(zip(names, truth, rounded, got, strict=True))
        ]

    first = truth[0]
    peer_limit = PEER_FACTOR * limit(1.0, errors(rounded[0], first)[0], largest(first), dtype)

    def agrees(results: Any) -> bool:
        return errors(part(results_of(results)[0].detach()), first)[0] <= peer_limit

    return Verdict(findings, agrees)


def results_of(results: Any) -> list[Tensor]:
    """Return the result of a call as a list, whether the call returns one tensor or several."""
    return [results] if isinstance(results, Tensor) else list(results)
