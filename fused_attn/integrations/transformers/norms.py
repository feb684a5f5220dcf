"""The RMS norms of Hugging Face transformers, for `swap_modules`.

Every model of the library has a norm class of its own, and nearly all of them are copies of a few.
So a class is known by the code of its methods: it is swapped if that is the code of a class in
`_STYLES`, and left alone if it is anything else, whatever its name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, dtype
from torch.nn import Module

from fused_attn import functional
from fused_attn.nn._from_torch import REPLACEMENTS, FromTorch, replaces
from fused_attn.nn.norm import Norm


@dataclass(frozen=True)
class Style:
    """The way in which a class normalises.

    Attributes:
        eps: the attribute that is added to the mean square.
        offset: added to the weight, in float32.
        out_dtype: the type of the output, by the types of the input and the weight.
    """

    eps: str
    offset: float
    out_dtype: Callable[[dtype, dtype], dtype]


def _of_input(input: dtype, weight: dtype) -> dtype:
    return input


def _promoted(input: dtype, weight: dtype) -> dtype:
    return torch.promote_types(input, weight)


def _of_half_weight(input: dtype, weight: dtype) -> dtype:
    half = weight in (torch.float16, torch.bfloat16)
    return weight if half else torch.promote_types(input, weight)


# (module under transformers.models, class) -> its style. Each stands for all its copies.
_STYLES = {
    ("llama.modeling_llama", "LlamaRMSNorm"): Style("variance_epsilon", 0.0, _promoted),
    ("gemma2.modeling_gemma2", "Gemma2RMSNorm"): Style("eps", 1.0, _of_input),
    ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"): Style("variance_epsilon", 0.0, _of_input),
    ("t5.modeling_t5", "T5LayerNorm"): Style("variance_epsilon", 0.0, _of_half_weight),
}


class TransformersNorm(Norm):
    """Base of the fused classes, which are made as the classes that they replace are met.

    Numbers are rounded once, where the originals round the normalised row and, but for Gemma, its
    product with the weight. float64 stays float64, where the originals go through float32.
    """

    source: type[Module]
    style: Style
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise hidden_states, (*, hidden_size); the output has the type of the original's."""
        weight, style = self.weight, self.style
        out_dtype = style.out_dtype(hidden_states.dtype, weight.dtype)
        rows = hidden_states.to(torch.promote_types(hidden_states.dtype, out_dtype))
        if style.offset:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + style.offset
        out = functional.rms_norm(rows, weight.shape, weight, getattr(self, style.eps))
        return cast(Tensor, out).to(out_dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and copy find a class by its name, and there is none for one made at run time.
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(max(protocol, 2)))
        return _unpickled, (self.source,), *state


def register(model: Module) -> None:
    """Let the norms of transformers that are in a model be swapped, if their code is known."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls not in REPLACEMENTS and _may_be_known(cls):
                style = _known_code().get(_code(cls))
                if style is not None:
                    _replace(cls, style)


def _replace(source: type[Module], style: Style) -> type[FromTorch]:
    body = {"__module__": __name__, "source": source, "style": style}
    fused = type(source.__name__, (TransformersNorm, source), body)
    return replaces(source)(fused)


def _unpickled(source: type[Module]) -> Module:
    """An object of the fused class of `source`, without state."""
    fused = REPLACEMENTS.get(source) or _replace(source, _known_code()[_code(source)])
    return fused.__new__(fused)


def _may_be_known(cls: type) -> bool:
    """True if a class may be one of _known_code, which has to import models."""
    library = cls.__module__.partition(".")[0]
    return (
        library in ("transformers", "transformers_modules")  # the latter: code from the hub
        and cls.__bases__ == (Module,)
        and cls.__name__.endswith("Norm")
    )


@functools.cache
def _known_code() -> dict[Any, Style]:
    known = {}
    for (module, name), style in _STYLES.items():
        cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        known[_code(cls)] = style
    return known


def _code(cls: type) -> Any:
    """The bytecode of the methods that compute, without their names and places in a file."""
    methods = []
    for name in ("forward", "_norm", "__call__"):
        code = getattr(cls.__dict__.get(name), "__code__", None)
        methods.append(
            code
            and (code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars)
        )
    return tuple(methods)
