"""Fused rotary embeddings in the attention modules of Hugging Face transformers.

The modules call a global function of their file. Most models have a copy of one of the functions in
`_ORIGINALS`. The `forward` of a fused module is the code of the original `forward`, in which the
name of the global function refers to the fused one. No global of transformers is changed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fused_attn.nn._from_torch import FromTorch
from fused_attn.ops.rotary import Rotation, rotate

# Modules under transformers.models whose apply_rotary_pos_emb differ in code, and whether a pair is
# two neighboring dimensions. All compute x * cos + rotate_half(x) * sin for the first dimensions.
_ORIGINALS = {
    "llama": False,
    "gpt_neox": False,  # rotates the first dimensions only, as does the next
    "phi3": False,
    "gemma4": False,  # one tensor a call
    "olmo": False,
    "modernbert": False,
    "cohere": True,
}


class RotaryAttention(FromTorch):
    """Base class of attention modules that `swap_modules` creates, one for each class it finds."""


def fused_forward(source: type[Module]) -> FunctionType | None:
    """Return `forward` of a class with fused rotary embeddings; None if their code is not known."""
    forward = vars(source).get("forward")
    innermost = inspect.unwrap(forward) if forward is not None else None
    if not isinstance(forward, FunctionType) or not isinstance(innermost, FunctionType):
        return None
    fused = dict(_fused_globals(innermost))
    if not fused:
        return None
    # torch.compile looks up globals in the module that they name.
    module = ModuleType(f"{__name__}.{source.__module__}.{source.__qualname__}")
    vars(module).update(innermost.__globals__ | fused, __name__=module.__name__)
    sys.modules[module.__name__] = module
    return _rebound(forward, vars(module))


def _rebound(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function, or of what decorators have wrapped, with other globals."""
    closure, inner = function.__closure__, getattr(function, "__wrapped__", None)
    if inner is not None:
        own, rebound = function.__globals__, _rebound(inner, names)
        cells = (CellType(rebound) if c.cell_contents is inner else c for c in closure or ())
        closure = tuple(cells)
    else:
        own, rebound = names, None
    copy = FunctionType(function.__code__, own, function.__name__, function.__defaults__, closure)
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    if rebound is None:
        del copy.__wrapped__  # type: ignore[attr-defined]
    else:
        copy.__wrapped__ = rebound  # type: ignore[attr-defined]
    return copy


def _fused_globals(forward: FunctionType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the names of known rotary functions that a method calls, and their fused versions."""
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, FunctionType) and name.startswith("apply_rotary"):
            interleaved = _known().get(_code(function))
            if interleaved is not None:
                yield name, _fused(function, interleaved)


@functools.cache
def _fused(original: FunctionType, interleaved: bool) -> Callable[..., Any]:
    code = original.__code__
    count = code.co_varnames.index("cos")  # of tensors before the tables
    casts = "to" in code.co_names  # results have the dtype of the tensors, for any dtype of cos

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if len(args) != count + 2 or kwargs.keys() - {"unsqueeze_dim"}:
            return original(*args, **kwargs)
        heads = kwargs.get("unsqueeze_dim", 1)
        if torch.compiler.is_compiling() or not _fits(*args, heads=heads, casts=casts):
            return original(*args, **kwargs)
        *tensors, cos, sin = args
        rotation = Rotation(cos, sin, None, interleaved, whole=True)
        results = tuple(
            rotate(x.transpose(1, heads), rotation).transpose(1, heads) for x in tensors
        )
        return results if count > 1 else results[0]

    return apply_rotary_pos_emb


def _fits(*args: Tensor, heads: int, casts: bool) -> bool:
    """Return True if the fused function returns what the original does, except for rounding.

    Args:
        args: queries, perhaps keys, cos and sin.
        heads: the dimension of the heads, 1 or 2.
        casts: True if the dtype of the result does not depend on that of cos.
    """
    *tensors, cos, sin = args
    if cos.dim() != 3 or sin.shape != cos.shape or sin.dtype != cos.dtype or heads not in (1, 2):
        return False
    batch, seqlen, width = cos.shape
    return width % 2 == 0 and all(
        x.dim() == 4
        and (casts or x.dtype == cos.dtype)
        and x.shape[3 - heads] == seqlen
        and batch in (1, x.shape[0])
        and width <= x.shape[3]
        for x in tensors
    )


@functools.cache
def _known() -> dict[Any, bool]:
    known = {}
    for name, interleaved in _ORIGINALS.items():
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        known[_code(module.apply_rotary_pos_emb)] = interleaved
    return known


def _code(function: FunctionType) -> Any:
    """Return a key that is equal for functions of equal code, whose helpers have equal code."""
    code, helper = function.__code__, function.__globals__.get("rotate_half")
    constants = tuple(c for c in code.co_consts if not isinstance(c, str))  # no docstring
    own = code.co_code, constants, code.co_names, code.co_varnames
    if "rotate_half" not in code.co_names or function.__name__ == "rotate_half":
        return own
    return own, _code(helper) if isinstance(helper, FunctionType) else None
