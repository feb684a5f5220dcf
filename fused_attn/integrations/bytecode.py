"""Bytecode inspection, by which integrations recognize the operations of functions and classes.

Source code is not read, because classes and functions created by exec have none.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch.nn import Module

_MODEL_BASES = "transformers.modeling_utils"


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of its nested functions and comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@functools.cache
def methods_of(kind: type) -> tuple[CodeType, ...]:
    """Return the code objects of the methods of a class and its bases.

    The base classes of torch and of all models of transformers are omitted.
    """
    found: list[CodeType] = []
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base.__module__ == _MODEL_BASES:
            continue
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, FunctionType):
                found += codes(function.__code__)
    return tuple(found)


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """Return the global and attribute names in the methods of a class and its bases."""
    return frozenset(name for code in methods_of(kind) for name in code.co_names)


def keywords_in(kind: type) -> frozenset[str]:
    """Return the keyword argument names of the calls in the methods of a class and its bases."""
    constants = (constant for code in methods_of(kind) for constant in code.co_consts)
    names = (name for constant in constants if isinstance(constant, tuple) for name in constant)
    return frozenset(name for name in names if isinstance(name, str))


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the variables that a function captures, by name, except unassigned ones."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def loads(function: FunctionType, module: Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of all globals and attributes that a function loads.

    The operator @ yields "matmul". The value is None if the code does not determine it.

    Args:
        function: a method of `module`, or a function called by such a method.
        module: the module in which attributes of `self` are looked up.
    """
    for code in codes(function.__code__):
        value: Any = None
        for instruction in dis.get_instructions(code):
            name, opname = instruction.argval, instruction.opname
            if instruction.argrepr in ("@", "@=") or opname.endswith("MATRIX_MULTIPLY"):
                yield "matmul", None
            if instruction.opcode not in dis.hasname or opname.startswith("STORE"):
                value = None
                continue
            if opname == "LOAD_GLOBAL":
                value = function.__globals__.get(name)
            elif isinstance(value, (ModuleType, type)):
                value = inspect.getattr_static(value, name, None)  # getattr might import
            else:  # perhaps an attribute of self
                value = _attribute(module, name, function)
            yield str(getattr(value, "__name__", name)), value  # not an import alias


def _attribute(module: Module, name: str, reader: FunctionType) -> Any:
    """Return an attribute of a module without running properties; None if there is none.

    If `reader` loads the name of a method that it overrides, as in super().forward, return that.
    """
    for attributes in (module._modules, vars(module)):
        if name in attributes:
            return attributes[name]
    found = [vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)]
    if name == reader.__name__ and reader in found:
        found = found[found.index(reader) + 1 :]
    return found[0] if found else None
