"""Fused feed-forward and residual blocks of Hugging Face transformers encoders.

The elementwise operations and the norm after each GEMM run in one pass. by_code.py derives each
fused class from a base class below and the replaced class, which defines the submodules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Dropout, Linear, Module
from transformers import activations

from fused_attn.nn.activation import NAMES_OF_MODULES, feed_forward_hidden
from fused_attn.nn.norm import residual_norm
from fused_attn.nn.replacement import FromTorch


class FeedForwardHidden(FromTorch):
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
        """Return the normalized sum, with the shape of the residual input_tensor, (*, hidden_size).

        hidden_states has shape (*, any width).
        """
        return residual_norm(self.LayerNorm, self.dropout, self.dense(hidden_states), input_tensor)


def _name_of(module: Any) -> str | None:
    act = module.act
    if isinstance(act, functools.partial) and act.func is F.gelu and not act.args:
        return "gelu_tanh" if act.keywords == {"approximate": "tanh"} else None
    return "gelu" if act is F.gelu else None


NAMES_OF_MODULES[activations.GELUActivation] = _name_of
NAMES_OF_MODULES[activations.GELUTanh] = _name_of
NAMES_OF_MODULES[activations.NewGELUActivation] = lambda module: "gelu_tanh"
