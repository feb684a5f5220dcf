"""Hugging Face transformers modules that `swap_modules` recognizes by their bytecode.

Every model of the library defines its classes separately, and nearly all are copies of a few. A
class is swapped if its methods have the same code as a class below, whatever its name. All other
classes are left alone.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

from torch.nn import Module

from fused_attn.integrations.transformers.blocks import ResidualNorm, Widening
from fused_attn.integrations.transformers.norms import STYLES, TransformersNorm
from fused_attn.nn._from_torch import REPLACEMENTS, FromTorch, replaces

# (module under transformers.models, class) -> the replacement and its class attributes. Each entry
# covers all copies of the class.
_KNOWN: dict[tuple[str, str], tuple[type[FromTorch], dict[str, Any]]] = {
    **{name: (TransformersNorm, {"style": style}) for name, style in STYLES.items()},
    ("bert.modeling_bert", "BertIntermediate"): (Widening, {}),
    ("bert.modeling_bert", "BertOutput"): (ResidualNorm, {}),
}
_ENDINGS = ("Norm", "Intermediate", "Output")  # class names without these are not compared


def register(model: Module) -> None:
    """Register replacements for the transformers modules in a model whose code is known."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls not in REPLACEMENTS and _may_be_known(cls) and _code(cls) in _by_code():
                _replace(cls)


def _replace(source: type[Module]) -> type[FromTorch]:
    base, attributes = _by_code()[_code(source)]
    body = {"__module__": base.__module__, "__reduce_ex__": _reduce_ex, "source": source}
    body |= attributes
    return replaces(source)(type(source.__name__, (base, source), body))


def _reduce_ex(self: Any, protocol: Any) -> Any:
    # pickle and copy look classes up by name; a class made at run time can't be found that way.
    _, _, *state = cast(tuple[Any, ...], Module.__reduce_ex__(self, max(protocol, 2)))
    return _unpickled, (self.source,), *state


def _unpickled(source: type[Module]) -> Module:
    """Return an instance of the fused class of `source`, without state."""
    fused = REPLACEMENTS.get(source) or _replace(source)
    return fused.__new__(fused)


def _may_be_known(cls: type) -> bool:
    """Return True if `_by_code()` may contain a class; cheaper, as it imports no models."""
    library = cls.__module__.partition(".")[0]
    return (
        library in ("transformers", "transformers_modules")  # the latter: code from the hub
        and cls.__bases__ == (Module,)
        and cls.__name__.endswith(_ENDINGS)
    )


@functools.cache
def _by_code() -> dict[Any, tuple[type[FromTorch], dict[str, Any]]]:
    known = {}
    for (module, name), replacement in _KNOWN.items():
        cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        known[_code(cls)] = replacement
    return known


def _code(cls: type) -> Any:
    """Return the bytecode of a class's computing methods, without names and line numbers."""
    methods = []
    for name in ("forward", "_norm", "__call__"):
        code = getattr(cls.__dict__.get(name), "__code__", None)
        methods.append(
            code
            and (code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars)
        )
    return tuple(methods)
