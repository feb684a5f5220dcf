"""Hugging Face transformers modules that `swap_modules` recognizes by their bytecode.

Every transformers model defines its own norm and feed-forward classes, but nearly all are copies of
a few originals. A class is swapped if its methods have the bytecode of an original listed below,
regardless of its name, or if it calls a rotary function with the bytecode of an original
(rotary.py). All other classes remain unchanged.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any, cast

from torch.nn import Module

from fused_attn.integrations.transformers.blocks import FeedForwardHidden, ResidualNorm
from fused_attn.integrations.transformers.norms import STYLES, TransformersNorm
from fused_attn.integrations.transformers.rotary import RotaryAttention, fused_forward
from fused_attn.nn.replacement import REPLACEMENTS, FromTorch, is_original, replaces

# Maps an original, (module under transformers.models, class name), to the base class of its
# replacement and additional class attributes. Each entry also covers the classes of other models
# that have the same code as the original.
_FUSED_BLOCKS: dict[tuple[str, str], tuple[type[FromTorch], dict[str, Any]]] = {
    **{name: (TransformersNorm, {"style": style}) for name, style in STYLES.items()},
    ("bert.modeling_bert", "BertIntermediate"): (FeedForwardHidden, {}),
    ("bert.modeling_bert", "BertOutput"): (ResidualNorm, {}),
}
_METHODS = ("forward", "_norm", "__call__")  # methods whose code is compared
# Endings of class names; other classes are not compared.
_ENDINGS = ("Norm", "Intermediate", "Output", "Attention")
_registering = threading.Lock()


def register(model: Module) -> None:
    """Register fused replacements for the transformers classes in `model` with known code."""
    with _registering:
        for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
            if _is_candidate(cls) and _is_new(cls):
                _replace(cls)


def _is_new(source: type[Module]) -> bool:
    """Return True if a class has no replacement, or if its forward was patched after the swap."""
    fused: Any = REPLACEMENTS.get(source)
    if fused is None:
        return True
    if fused.source_forward == (vars(source).get("forward"),):
        return False
    del REPLACEMENTS[source]
    return True


def _replace(source: type[Module]) -> type[FromTorch] | None:
    """Register the replacement of a class and return it; None if its code is not known."""
    base, attributes = _by_code().get(_code(source), (RotaryAttention, {}))
    if base is RotaryAttention:
        forward = fused_forward(source)
        if forward is None:
            return None
        attributes = {"forward": forward}
    body = {"__module__": base.__module__, "__reduce_ex__": _reduce_ex, "source": source}
    body |= {"source_forward": (vars(source).get("forward"),), **attributes}
    return replaces(source)(type(source.__name__, (base, source), body))


def _reduce_ex(self: Any, protocol: Any) -> Any:
    # pickle and copy look up classes by name and would not find a class created at run time.
    _, _, *state = cast(tuple[Any, ...], Module.__reduce_ex__(self, max(protocol, 2)))
    return _unpickled, (self.source,), *state


def _unpickled(source: type[Module]) -> Module:
    """Return an uninitialized module, for unpickling: fused if the code of `source` is known."""
    fused = REPLACEMENTS.get(source) or _replace(source)
    kind = fused or source  # the code may differ in another version of the library
    return kind.__new__(kind)


def _is_candidate(cls: type) -> bool:
    """Return True if `_by_code()` may contain a class; cheap, because it imports no models."""
    library = cls.__module__.partition(".")[0]
    return (
        library in ("transformers", "transformers_modules")  # the latter: code from the Hub
        and cls.__bases__ == (Module,)
        and cls.__name__.endswith(_ENDINGS)
    )


@functools.cache
def _by_code() -> dict[Any, tuple[type[FromTorch], dict[str, Any]]]:
    fused = {}
    for (file, name), replacement in _FUSED_BLOCKS.items():
        cls = getattr(importlib.import_module(f"transformers.models.{file}"), name)
        if all(is_original(cls, method) for method in _METHODS if method in vars(cls)):
            fused[_code(cls)] = replacement
    return fused


def _code(cls: type) -> Any:
    """Return a key that is equal for classes whose methods have equal code, in any file."""
    found = [getattr(vars(cls).get(name), "__code__", None) for name in _METHODS]
    return tuple(
        code and (code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars)
        for code in found
    )
