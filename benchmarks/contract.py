"""Checked before it is timed, by the numerics contract of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fused_attn.tools import contract


def check(
    name: str, dtype: torch.dtype, call: Callable[..., Tensor], operands: Iterable[Tensor],
    gradients: bool,
) -> None:  # fmt: skip
    """call(*operands), and its gradients, against eager attention in float64 and in `dtype`."""
    own, eager = contract.by("cpp", call), contract.by("eager", call)
    check_part(name, dtype, own, eager, list(operands), gradients)


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
    verdict.require(name)
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
        expected, got = theirs(model.eval())[real], ours()[real]
    finding = contract.judge("the model's output", got, truth, expected, gradient=False)
    assert finding.ok, str(finding)
