"""Fused feed-forward and residual blocks of Hugging Face transformers encoders.

The operations around each matrix product run in a single pass. by_code.py derives classes from a
base below and the replaced class; the base uses the submodules of the latter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Dropout, Linear, Module
from transformers import activations

from fused_attn.nn._from_torch import FromTorch
from fused_attn.nn.activation import NAMES_OF_MODULES, feed_forward_hidden
from fused_attn.nn.norm import residual_norm


class Widening(FromTorch):
    """First half of a feed-forward block: activation(dense(hidden_states))."""

    dense: Linear
    intermediate_act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (*, hidden_size) to (*, intermediate_size)."""
        return feed_forward_hidden(self.dense, self.intermediate_act_fn, None, hidden_states)


class ResidualNorm(FromTorch):
    """End of a sublayer: LayerNorm(dropout(dense(hidden_states)) + input_tensor)."""

    dense: Linear
    dropout: Dropout
    LayerNorm: Module

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Map (*, any width) and the residual (*, hidden_size) to (*, hidden_size)."""
        return residual_norm(self.LayerNorm, self.dropout, self.dense(hidden_states), input_tensor)


def _name_of(module: Any) -> str | None:
    act = module.act
    if isinstance(act, functools.partial) and act.func is F.gelu and not act.args:
        return "gelu_tanh" if act.keywords == {"approximate": "tanh"} else None
    return "gelu" if act is F.gelu else None


NAMES_OF_MODULES[activations.GELUActivation] = _name_of
NAMES_OF_MODULES[activations.GELUTanh] = _name_of
NAMES_OF_MODULES[activations.NewGELUActivation] = lambda module: "gelu_tanh"
