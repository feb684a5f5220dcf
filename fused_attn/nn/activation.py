"""Fused dropout, and fused bias, activation and dropout for feed-forward blocks.

Dropout masks differ from torch's, and dropped elements are 0 even if they were non-finite.
Otherwise, results differ from torch's only by rounding. User-defined modules and modules with hooks
are called unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import GELU, Dropout, Linear, Module, ReLU

from fused_attn.base import small_calls
from fused_attn.base.torch_state import needs_grad
from fused_attn.nn.replacement import is_plain
from fused_attn.ops.activation import activation_backend, activation_pass

_FUNCTIONS = ((F.relu, "relu"), (torch.relu, "relu"), (F.gelu, "gelu"))
# Minimum number of elements for the fused pass with dropout. base/small_calls.py has the limits
# without dropout. Time of forward plus backward:
#     2 x 16 elements:   fused 57 us, torch 28 us
#     1 x 4096 elements: fused 59 us, torch 50 us
#     64 x 512 elements: fused 75 us, torch 213 us
MIN_NUMEL = 8192

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
# Maps an exact module class to a function that returns a module's activation name, or None.
NAMES_OF_MODULES: dict[type[Module], Callable[[Any], str | None]] = {
    ReLU: lambda module: "relu",
    GELU: lambda module: _GELUS.get(module.approximate),
}


def drop(dropout: Module, input: Tensor) -> Tensor:
    """Compute dropout(input), with the fused kernel if the input is large enough."""
    out, backend = None, activation_backend(input)
    if backend is not None and _drops(dropout) and input.numel() >= MIN_NUMEL:
        p: Any = dropout.p
        out = activation_pass(input, None, "identity", p, backend=backend)
    return dropout(input) if out is None else out


def feed_forward_hidden(
    linear: Module, activation: Callable[[Tensor], Tensor], dropout: Module | None, input: Tensor
) -> Tensor:
    """Compute dropout(activation(linear(input))) as one GEMM and one fused elementwise pass.

    Unsupported activations and inputs, and small inputs, run as separate operations.
    """
    name = activation_name(activation)
    drops = dropout is not None and _drops(dropout)
    backend = None if name is None else activation_backend(input)
    if name is None or backend is None or not _is_large(linear, input, drops):
        out = activation(linear(input))
        return out if dropout is None else drop(dropout, out)
    bias: Any = linear.bias if type(linear) is Linear and is_plain(linear) else None
    if bias is None:
        hidden, backend = linear(input), None  # a user-defined layer may return any tensor
    else:
        hidden = F.linear(input, linear.weight)  # type: ignore[arg-type]
    dropout_p: Any = dropout.p if dropout is not None and drops else 0.0
    # Overwrite only the output of our GEMM: a user-defined layer may still use its output.
    overwrite = bias is not None
    fused = activation_pass(hidden, bias, name, dropout_p, backend=backend, overwrite=overwrite)
    if fused is None:
        total = hidden if bias is None else hidden + bias.to(hidden.dtype)
        fused, dropout_p = activation(total), 0.0
    return fused if dropout is None or dropout_p > 0.0 else dropout(fused)


def activation_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Return the activation's name in `backends.base.ACTIVATIONS`, or None if not supported."""
    if isinstance(activation, Module):
        name_of = NAMES_OF_MODULES.get(type(activation))
        return name_of(activation) if name_of is not None and is_plain(activation) else None
    return next((name for function, name in _FUNCTIONS if activation is function), None)


def _is_large(linear: Any, input: Tensor, drops: bool) -> bool:
    numel = max(input.numel(), input.shape[:-1].numel() * getattr(linear, "out_features", 0))
    if drops:
        return numel >= MIN_NUMEL
    weight = getattr(linear, "weight", None)  # quantized layers have a method of this name
    limits = small_calls.limits
    trains = needs_grad(input, weight if isinstance(weight, Tensor) else None)
    return numel >= (limits.activation_training if trains else limits.activation_forward)


def _drops(dropout: Module) -> bool:
    return type(dropout) is Dropout and dropout.training and dropout.p > 0.0 and is_plain(dropout)
