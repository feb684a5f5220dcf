"""Detection of attention in modules without a fused counterpart, with advice on how to fuse it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

import torch
from torch.nn import Module

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_SDPA = "scaled_dot_product_attention"

CALLS_SDPA = (
    "calls torch.nn.functional.scaled_dot_product_attention: fused_attn.enable() takes it over"
)
BY_HAND = (
    "has attention written out by hand, a softmax between two products: torch.compile with "
    "fused_attn.compile_pass() fuses it"
)


def attention_in(module: Module) -> str | None:
    """Return CALLS_SDPA or BY_HAND if the methods of a module compute attention, else None.

    The search covers the class and its bases, except classes of torch and of this package. It does
    not follow function calls.
    """
    softmaxes = {name for name, child in module.named_children() if _is_softmax(child)}
    by_hand = False
    for code in _codes(type(module)):
        if _SDPA in code.co_names:
            return CALLS_SDPA
        by_hand = by_hand or _is_attention(code, softmaxes)
    return BY_HAND if by_hand else None


def _is_softmax(module: Module) -> bool:
    """Return True for torch.nn.Softmax, and for a Sequential that begins with one."""
    if isinstance(module, torch.nn.Sequential) and len(module):
        module = module[0]
    return isinstance(module, torch.nn.Softmax)


def _codes(cls: type) -> Iterator[types.CodeType]:
    """Yield the code objects of a class's methods, except methods of torch and this package."""
    for base in cls.__mro__:
        if base is Module or base.__module__.startswith(("torch.", "fused_attn.")):
            continue
        for method in vars(base).values():
            method = getattr(method, "__func__", method)
            if isinstance(method, types.FunctionType):
                yield method.__code__


def _is_attention(code: types.CodeType, softmaxes: set[str]) -> bool:
    """Return True for code with at least two matmuls and a softmax after the first matmul."""
    events = ""
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if name in softmaxes or (isinstance(name, str) and name.endswith("softmax")):
            events += "s"
        elif instruction.argval in _PRODUCTS or instruction.argrepr == "@":
            events += "p"
    return events.count("p") > 1 and events.find("p") < events.find("s")
