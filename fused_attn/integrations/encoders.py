"""Encoders of Hugging Face transformers on the real tokens of a padded batch.

Between embeddings and pooling, the stacks below do nothing but run their layers, and those work on
each token by itself, attention aside. So a batch is packed in front of them and unpacked behind.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from fused_attn.nn.packing import BY_TOKEN, Packing, alone, packing_of, watched

# modeling file -> its stack of encoder layers
_STACKS = {
    "bert": "BertEncoder",
    "camembert": "CamembertEncoder",
    "distilbert": "Transformer",
    "electra": "ElectraEncoder",
    "roberta": "RobertaEncoder",
    "xlm_roberta": "XLMRobertaEncoder",
}


class _Packs(Module):
    """What takes the place of a stack: the same, on packed batches where nobody could tell."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As the stack's own; rows of padding are 0 where the batch was packed."""
        run: Callable[..., Any] = super().forward
        others = {
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_values": past_key_values,
        }
        given = {name: value for name, value in others.items() if value is not None}
        packing = None if given or args else _packing(self, hidden_states, attention_mask)
        if packing is None:
            return run(hidden_states, attention_mask, *args, **given, **kwargs)
        output = run(packing.pack(hidden_states), packing, **kwargs)
        output.last_hidden_state = packing.unpack(output.last_hidden_state, hidden_states.shape)
        return output


def fused_stack(stack: type[Module]) -> type[Module] | None:
    """The class that packs in place of a stack's; None if there is none."""
    *_, package, module = ("", *stack.__module__.split("."))
    if _STACKS.get(package) != stack.__name__ or module != f"modeling_{package}":
        return None
    return _fused(package)


@functools.cache
def _fused(package: str) -> type[Module]:
    library = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    stack = getattr(library, _STACKS[package])
    name = f"Fused_{package}"  # `__getattr__` finds it, so that its objects can be unpickled
    return type(name, (_Packs, stack), {"__module__": __name__, "__doc__": _Packs.__doc__})


def __getattr__(name: str) -> Any:
    package = name.removeprefix("Fused_")
    if package != name and package in _STACKS:
        return _fused(package)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _packing(stack: Module, hidden_states: Tensor, mask: Any) -> Packing | None:
    """How to pack; None where it does not pay or a module of the stack could tell."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if hidden_states.dim() != 3 or watched(hidden_states, mask):
        return None
    if mask.shape != (hidden_states.shape[0], 1, 1, hidden_states.shape[1]):
        return None
    if not all(_works_by_token(module, stack) for module in stack.modules()):
        return None
    return packing_of(~mask[:, 0, 0], None, False, batch_first=True)


def _works_by_token(module: Module, stack: Module) -> bool:
    known = (type(stack).__mro__[2].__module__, "transformers.activations", __name__)
    return alone(module) and (
        isinstance(module, (*BY_TOKEN, ModuleList)) or type(module).__module__ in known
    )
