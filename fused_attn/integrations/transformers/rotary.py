"""Fused rotary embeddings in the attention modules of Hugging Face transformers.

The modules call a global function of their file, for most models a copy of a function listed in
`_ORIGINALS`. The `forward` of a fused module has the code of the original `forward`, but calls a
fused function that is added to the file's globals. Existing globals do not change.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Module

from fused_attn.base.torch_state import is_compiling
from fused_attn.nn.replacement import FromTorch
from fused_attn.ops.rotary import Rotation, rotate_by_kernel

# Modules under transformers.models whose apply_rotary_pos_emb differ in code; True if neighboring
# dimensions form pairs. All compute x * cos + rotate_half(x) * sin for the first dimensions.
_ORIGINALS = {
    "llama": False,
    "gpt_neox": False,  # this and phi3 rotate only the first dimensions
    "phi3": False,
    "gemma4": False,  # rotates one tensor per call
    "olmo": False,
    "modernbert": False,
    "cohere": True,
}
_PREFIX = "_fused_attn_"  # prefix of the names of the new globals


class RotaryAttention(FromTorch):
    """Base class of attention modules that `swap_modules` creates, one for each class it finds."""


def fused_forward(source: type[Module]) -> FunctionType | None:
    """Return `forward` of a class with fused rotary embeddings; None if their code is not known."""
    forward = vars(source).get("forward")
    innermost = inspect.unwrap(forward) if forward is not None else None
    if not isinstance(forward, FunctionType) or not isinstance(innermost, FunctionType):
        return None
    fused = dict(_fused_globals(innermost))
    forward = _renamed(forward, fused.keys()) if fused else None
    if forward is not None:
        innermost.__globals__.update({_PREFIX + name: f for name, f in fused.items()})
    return forward


def _renamed(function: FunctionType, names: Any) -> FunctionType | None:
    """Return a copy of a function and its decorators that loads renamed globals.

    Return None if a decorator does not hold the function in a closure variable.
    """
    code, inner = function.__code__, getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    if inner is None:
        code = code.replace(co_names=tuple(_PREFIX + n if n in names else n for n in code.co_names))
    else:
        holds = [c != CellType() and c.cell_contents is inner for c in cells]
        inner = _renamed(inner, names) if isinstance(inner, FunctionType) and any(holds) else None
        if inner is None:
            return None
        cells = tuple(CellType(inner) if h else c for c, h in zip(cells, holds, strict=True))
    copy = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, cells or None
    )
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    if inner is None:
        del copy.__wrapped__  # type: ignore[attr-defined]
    else:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


def _fused_globals(forward: FunctionType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the names of known rotary functions that a method calls, and their fused versions."""
    loads = [i for i in dis.get_instructions(forward) if i.opcode in dis.hasname]
    for name in {i.argval for i in loads if str(i.argval).startswith("apply_rotary")}:
        interleaved = _known().get(_code(forward.__globals__.get(name)))
        if interleaved is not None and all(
            i.opname == "LOAD_GLOBAL" for i in loads if i.argval == name
        ):
            yield name, _fused(forward.__globals__[name], name, interleaved)


@functools.cache
def _fused(original: FunctionType, name: str, interleaved: bool) -> Callable[..., Any]:
    code, names = original.__code__, original.__globals__
    count = code.co_varnames.index("cos")  # number of tensors before the tables
    casts = "to" in code.co_names  # results have the dtype of the tensors, for any dtype of cos
    partial = "cat" in code.co_names  # the tables may be narrower than the tensors

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if names.get(name) is not original:  # other code replaced it after the swap
            return names[name](*args, **kwargs)
        heads = kwargs.get("unsqueeze_dim", 1)
        if (
            is_compiling()
            or len(args) != count + 2
            or kwargs.keys() - {"unsqueeze_dim"}
            or not _fits(args, heads, casts, partial)
        ):
            return original(*args, **kwargs)
        *tensors, cos, sin = args
        rotation = Rotation(cos, sin, None, interleaved, per_dimension=True)
        results = []
        for x in tensors:
            rotated = rotate_by_kernel(x.transpose(1, heads), rotation)
            if rotated is None:
                return original(*args, **kwargs)
            results.append(rotated.transpose(1, heads))
        return tuple(results) if count > 1 else results[0]

    return apply_rotary_pos_emb


def _fits(args: tuple[Tensor, ...], heads: int, casts: bool, partial: bool) -> bool:
    """Return True if the fused and the original function agree up to rounding.

    Args:
        args: queries, perhaps keys, cos and sin.
        heads: the dimension of the heads, 1 or 2.
        casts: the dtype of the result does not depend on that of cos.
        partial: the tables may be narrower than the tensors.
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
        and (width == x.shape[3] or (partial and width < x.shape[3]))
        for x in tensors
    )


@functools.cache
def _known() -> dict[Any, bool]:
    known = {}
    for name, interleaved in _ORIGINALS.items():
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        code = _code(module.apply_rotary_pos_emb)
        # Other code may have replaced the function.
        if code is not None and module.apply_rotary_pos_emb.__code__.co_filename == module.__file__:
            known[code] = interleaved
    return known


def _code(function: Any) -> Any:
    """Return a key that is equal for functions with equal code, including that of rotate_half.

    Return None for closures and for objects other than functions.
    """
    if not isinstance(function, FunctionType) or function.__closure__ is not None:
        return None
    code, helper = function.__code__, function.__globals__.get("rotate_half")
    constants = tuple(c for c in code.co_consts if not isinstance(c, str))  # no docstring
    own = code.co_code, constants, code.co_names, code.co_varnames, function.__defaults__
    if "rotate_half" not in code.co_names or function is helper:
        return own
    return own, _code(helper)
