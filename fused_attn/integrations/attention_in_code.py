"""Detection of attention in modules without a fused counterpart, with advice on how to fuse it."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from types import FunctionType, MethodType
from typing import Any

from torch.nn import Module, Sequential, Softmax

from fused_attn.integrations.bytecode import loads

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_SDPA = "scaled_dot_product_attention"
# Libraries whose functions are identified by name, without reading their code.
_NOT_READ = sys.stdlib_module_names | {"torch", "fused_attn"}

CALLS_SDPA = (
    "calls torch.nn.functional.scaled_dot_product_attention: fused_attn.enable() patches it"
)
BY_HAND = (
    "has a softmax and two matrix products in its code, like hand-written attention: if it is "
    "attention, torch.compile with fused_attn.compile_pass() fuses it"
)
EITHER = (
    "calls torch.nn.functional.scaled_dot_product_attention in one branch, which "
    "fused_attn.enable() patches, and has hand-written attention in another, which "
    "torch.compile with fused_attn.compile_pass() fuses"
)


def attention_in(module: Module) -> str | None:
    """Return CALLS_SDPA, BY_HAND or EITHER if the code of a module has attention, else None.

    Counts operations in the code of `forward` and of its callees, in any order. Which of them run,
    and whether they form attention, is known only at run time.
    """
    function = _function(module.forward)
    found = _operations(function, module, {}) if function else Counter()
    by_hand = found["softmax"] > 0 and found["product"] > 1
    if found["sdpa"]:
        return EITHER if by_hand else CALLS_SDPA
    return BY_HAND if by_hand else None


def _operations(
    function: FunctionType, module: Module, known: dict[FunctionType, Counter[str]]
) -> Counter[str]:
    """Count "product", "softmax" and "sdpa" in a function of a module and in its callees."""
    if function in known:
        return known[function]
    known[function] = Counter()  # recursive calls add nothing
    found: Counter[str] = Counter()
    for name, value in loads(function, module):
        if name in _PRODUCTS:
            found["product"] += 1
        elif _is_softmax(value) or ("softmax" in name.lower() and "log" not in name.lower()):
            found["softmax"] += 1
        elif callee := _function(value):
            found += _operations(callee, module, known)
        elif name == _SDPA and _library(value) != "fused_attn":
            found["sdpa"] += 1
    known[function] = found
    return found


def _function(value: Any) -> FunctionType | None:
    """Return the Python function that a call of `value` runs.

    Return None for modules, classes and functions of the libraries in _NOT_READ.
    """
    if isinstance(value, (MethodType, classmethod, staticmethod)):
        value = value.__func__
    if not callable(value) or isinstance(value, (Module, type)):
        return None
    function = inspect.unwrap(value)
    if not isinstance(function, FunctionType):  # an object whose class has __call__
        function = inspect.getattr_static(type(function), "__call__", None)
    if not isinstance(function, FunctionType) or _library(function) in _NOT_READ:
        return None
    return function


def _library(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _is_softmax(value: Any) -> bool:
    """Return True for torch.nn.Softmax, and for a Sequential that begins with one."""
    if isinstance(value, Sequential) and len(value):
        value = value[0]
    return isinstance(value, Softmax)
