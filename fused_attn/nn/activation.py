"""Dropout, and what is between the two linear layers of a feed-forward block, in one pass.

What is dropped is drawn otherwise than by torch; nothing else changes. Modules of the user and
those that have hooks are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Dropout, Module, ReLU

from fused_attn.core.activation import dropped, dropped_relu
from fused_attn.nn._from_torch import is_plain

_RELU = (torch.nn.functional.relu, torch.relu)


def drop(dropout: Module, input: Tensor) -> Tensor:
    """dropout(input)."""
    out = dropped(input, dropout.p) if _drops(dropout) else None  # type: ignore[arg-type]
    return dropout(input) if out is None else out


def drop_activation(
    activation: Callable[[Tensor], Tensor], dropout: Module, input: Tensor
) -> Tensor:
    """dropout(activation(input)); only ReLU is part of the pass."""
    relu = activation in _RELU or (type(activation) is ReLU and is_plain(activation))
    if relu and _drops(dropout):
        out = dropped_relu(input, dropout.p)  # type: ignore[arg-type]
        if out is not None:
            return out
    return drop(dropout, activation(input))


def _drops(dropout: Module) -> bool:
    return type(dropout) is Dropout and dropout.training and is_plain(dropout)
