"""Dropout, and what is between the two linear layers of a feed-forward block, in one pass.

What is dropped is drawn otherwise than by torch, and is 0 also where it was NaN or infinite;
nothing else changes but rounding. Modules of the user and those that have hooks are called as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GELU, Dropout, Linear, Module, ReLU

from fused_attn.nn._from_torch import is_plain
from fused_attn.ops.activation import activation_pass, takes_activation

_FUNCTIONS = ((F.relu, "relu"), (torch.relu, "relu"), (F.gelu, "gelu"))
# Of what is dropped or activated: below it torch's operations, forward and backward, take as long
# or half as long (2 x 16 28 instead of 57 microseconds, 1 x 4096 50 and 59, 64 x 512 213 and 75).
MIN_NUMEL = 8192

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
# Of modules of exactly these classes the name of what they compute, see `activation_name`.
NAMES_OF_MODULES: dict[type[Module], Callable[[Any], str | None]] = {
    ReLU: lambda module: "relu",
    GELU: lambda module: _GELUS.get(module.approximate),
}


def drop(dropout: Module, input: Tensor) -> Tensor:
    """dropout(input)."""
    out = None
    if takes_activation(input) and _drops(dropout) and input.numel() >= MIN_NUMEL:
        out = activation_pass(input, None, "identity", dropout.p)  # type: ignore[arg-type]
    return dropout(input) if out is None else out


def feed_forward_hidden(
    linear: Module, activation: Callable[[Tensor], Tensor], dropout: Module | None, input: Tensor
) -> Tensor:
    """dropout(activation(linear(input))): one product and one pass."""
    name = activation_name(activation)
    if name is None or not takes_activation(input) or not _is_large(linear, input):
        out = activation(linear(input))
        return out if dropout is None else drop(dropout, out)
    bias: Any = linear.bias if type(linear) is Linear and is_plain(linear) else None
    hidden = linear(input) if bias is None else F.linear(input, linear.weight)  # type: ignore[arg-type]
    dropout_p: Any = dropout.p if dropout is not None and _drops(dropout) else 0.0
    # A linear layer of the user may return what it keeps.
    fused = activation_pass(hidden, bias, name, dropout_p, overwrite=bias is not None)
    if fused is None:
        total = hidden if bias is None else hidden + bias.to(hidden.dtype)
        fused, dropout_p = activation(total), 0.0
    return fused if dropout is None or dropout_p > 0.0 else dropout(fused)


def activation_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The activation among `backends.base.ACTIVATIONS`; None if it is none of them."""
    if isinstance(activation, Module):
        name_of = NAMES_OF_MODULES.get(type(activation))
        return name_of(activation) if name_of is not None and is_plain(activation) else None
    return next((name for function, name in _FUNCTIONS if activation is function), None)


def _is_large(linear: Any, input: Tensor) -> bool:
    width = getattr(linear, "out_features", 0)
    return input.numel() >= MIN_NUMEL or input.shape[:-1].numel() * width >= MIN_NUMEL


def _drops(dropout: Module) -> bool:
    return type(dropout) is Dropout and dropout.training and is_plain(dropout)
