"""Padding removal for the encoder stacks of Hugging Face transformers models.

The layers of the stacks below process each token independently, except in attention. A padded batch
is therefore packed before the stack and unpacked after it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from fused_attn.nn.packing import (
    TOKENWISE_MODULES,
    Packing,
    is_unmodified,
    must_stay_padded,
    outside_graphs,
    packing_of,
    saves_time,
)

NAME = "fused_attn"  # name of the attention implementation

# Maps a package under transformers.models to the class name of its encoder stack.
_STACKS = {
    "bert": "BertEncoder",
    "camembert": "CamembertEncoder",
    "distilbert": "Transformer",
    "electra": "ElectraEncoder",
    "roberta": "RobertaEncoder",
    "xlm_roberta": "XLMRobertaEncoder",
}


class PackedStack(Module):
    """Base class of encoder stacks that pack padded batches without changing real tokens.

    Attributes:
        zeroes_padding: if True, padded rows of the result are 0, packed or not, so the result does
            not depend on the amount of padding. If False, packing is disabled, and padded rows have
            the original stack's values. `swap_modules(model, remove_padding=False)` sets it to
            False.
    """

    zeroes_padding = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the stack, on the packed batch if attention_mask has enough padding.

        Args:
            hidden_states: (batch, seqlen, hidden_size).
            attention_mask: mask of the original stack. The batch can be packed only if this is a
                padding mask, (batch, 1, 1, seqlen) bool, True for real tokens.
            args, kwargs: other arguments of the original stack.

        Returns:
            The output of the original stack. With a padding mask, padded rows are 0 if
            `zeroes_padding` is True.
        """
        run: Callable[..., Any] = super().forward
        if args or _attends_elsewhere(kwargs):
            return run(hidden_states, attention_mask, *args, **kwargs)
        if not self.zeroes_padding or not _is_padding(hidden_states, attention_mask):
            return run(hidden_states, attention_mask, **kwargs)
        packing = outside_graphs(_packing, hidden_states, attention_mask, self)
        if packing is None:
            output = run(hidden_states, attention_mask, **kwargs)
            hidden = attention_mask[:, 0, 0, :, None].logical_not()
            output.last_hidden_state = output.last_hidden_state.masked_fill(hidden, 0.0)
        else:
            output = run(packing.pack(hidden_states), packing, **kwargs)
            output.last_hidden_state = packing.unpack(output.last_hidden_state, hidden_states.shape)
        return output


def fused_stack(stack: type[Module]) -> type[Module] | None:
    """Return the packing subclass of an encoder stack class; None if it is not supported."""
    *_, package, module = ("", *stack.__module__.split("."))
    if _STACKS.get(package) != stack.__name__ or module != f"modeling_{package}":
        return None
    return _fused(package)


@functools.cache
def _fused(package: str) -> type[Module]:
    library = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    name = f"Packed{_STACKS[package]}"  # importable through `__getattr__`, for unpickling
    members = {"__module__": __name__, "__doc__": PackedStack.__doc__, "library": library.__name__}
    return type(name, (PackedStack, getattr(library, _STACKS[package])), members)


def __getattr__(name: str) -> Any:
    for package, stack in _STACKS.items():
        if name == f"Packed{stack}":
            return _fused(package)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _attends_elsewhere(arguments: dict[str, Any]) -> bool:
    """Return True if the stack also attends to the output of an encoder or to a KV cache."""
    return any(
        value is not None
        and (name.startswith(("encoder_", "past_", "cache")) or hasattr(value, "get_seq_length"))
        for name, value in arguments.items()
    )


def _is_padding(hidden_states: Tensor, mask: Any) -> bool:
    """Return True if `mask` is a (batch, 1, 1, seqlen) bool tensor, a pure padding mask."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or hidden_states.dim() != 3:
        return False
    return mask.shape == (hidden_states.shape[0], 1, 1, hidden_states.shape[1])


def _packing(hidden_states: Tensor, mask: Tensor, stack: PackedStack) -> Packing | None:
    """Return the packing of a batch; None if it saves no time or a module is not token-wise."""
    ignored = ~mask[:, 0, 0]
    if must_stay_padded(hidden_states, mask) or not saves_time(hidden_states, ignored):
        return None
    if not all(_is_tokenwise(module, stack) for module in stack.modules()):
        return None
    return packing_of(ignored, None, False, batch_first=True)


def _is_tokenwise(module: Module, stack: Any) -> bool:
    config = getattr(module, "config", None)
    if config is not None and config._attn_implementation != NAME:
        return False  # other attention implementations do not accept a Packing
    if getattr(module, "chunk_size_feed_forward", 0):
        return False
    known = (stack.library, "transformers.activations")
    return is_unmodified(module) and (
        module is stack
        or type(module) in (*TOKENWISE_MODULES, ModuleList)
        or getattr(type(module), "source", type(module)).__module__ in known
    )
