"""Modules of Hugging Face transformers that are known by their code, for `swap_modules`.

Every model of the library has classes of its own, and nearly all of them are copies of a few. So a
class is swapped if the code of its methods is that of a class below, and left alone if it is
anything else, whatever its name.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

from torch.nn import Module

from fused_attn.integrations.transformers.blocks import ResidualNorm, Widening
from fused_attn.integrations.transformers.norms import STYLES, TransformersNorm
from fused_attn.nn._from_torch import REPLACEMENTS, FromTorch, replaces

# (module under transformers.models, class) -> what takes its place, and attributes of that. Each
# stands for all its copies.
_KNOWN: dict[tuple[str, str], tuple[type[FromTorch], dict[str, Any]]] = {
    **{name: (TransformersNorm, {"style": style}) for name, style in STYLES.items()},
    ("bert.modeling_bert", "BertIntermediate"): (Widening, {}),
    ("bert.modeling_bert", "BertOutput"): (ResidualNorm, {}),
}
_ENDINGS = ("Norm", "Intermediate", "Output")  # of names of classes that may be known


def register(model: Module) -> None:
    """Let the modules of transformers that are in a model be swapped, if their code is known."""
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
    # pickle and copy find a class by its name, and there is none for one made at run time.
    _, _, *state = cast(tuple[Any, ...], Module.__reduce_ex__(self, max(protocol, 2)))
    return _unpickled, (self.source,), *state


def _unpickled(source: type[Module]) -> Module:
    """An object of the fused class of `source`, without state."""
    fused = REPLACEMENTS.get(source) or _replace(source)
    return fused.__new__(fused)


def _may_be_known(cls: type) -> bool:
    """True if a class may be one of _by_code, which has to import models."""
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
    """The bytecode of the methods that compute, without their names and places in a file."""
    methods = []
    for name in ("forward", "_norm", "__call__"):
        code = getattr(cls.__dict__.get(name), "__code__", None)
        methods.append(
            code
            and (code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars)
        )
    return tuple(methods)
