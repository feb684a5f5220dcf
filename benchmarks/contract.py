"""Checked before it is timed, by the numerics contract of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import fused_attn
from fused_attn.tools import contract


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
    """Asserts that own(*operands), which is what is timed, is within the contract.

    Args:
        own, eager, part: as in `fused_attn.tools.contract.check`.

    Returns:
        Whether a peer's results are those of the same problem; all of them, not the part.
    """
    named = {str(i): tensor for i, tensor in enumerate(operands)}
    verdict = contract.check(own, eager, named, dtype, gradients, part)
    for finding in verdict.findings:
        assert finding.ok, (
            f"{finding.name} of {name} is wrong: {finding.error:.3e} off, {finding.limit:.3e} "
            "allowed"
        )
    return verdict.agrees


def check_model(
    ours: Callable[[], Tensor], theirs: Callable[[Module], Tensor], model: Module, real: Tensor
) -> None:
    """The contract on a model's output for its real tokens, in float32.

    Args:
        ours: the output that is timed.
        theirs: the output of the model that it is given, which is also called with one in float64.
        model: with torch's attention.
        real: (batch, seqlen) bool.
    """
    with torch.no_grad():
        truth = theirs(copy.deepcopy(model).double().eval())[real]
        expected = theirs(model.eval())[real].double()
        got = ours()[real].double()
    limit = 2 * (expected - truth).abs().max() + torch.finfo(torch.float32).eps * truth.abs().max()
    error = (got - truth).abs().max()
    assert error <= limit, f"error {error:.3g} is more than {limit:.3g}"
