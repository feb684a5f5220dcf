"""Conversion between calls and the flat argument lists of torch.library ops."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

FlatT = TypeVar("FlatT", bound="Flat")

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    bool: "bool",
}


class Flat:
    """Base class of dataclasses that can be flattened, to expose their tensors to torch.

    The flat form lists the fields in order; the fields of a nested Flat replace it. `flattens`
    compiles the conversions once per class from its fields, so a new field needs no other code.

    Attributes:
        NAMES: names of all flattened fields.
        TENSORS: names of the fields that are a tensor or an optional tensor.
        SCHEMA: the fields as parameters of a torch.library schema.
        DIFFERENTIABLE: names of the tensors with gradients, in the order of the op's gradients.
    """

    NAMES: ClassVar[tuple[str, ...]]
    TENSORS: ClassVar[tuple[str, ...]]
    SCHEMA: ClassVar[str]
    DIFFERENTIABLE: ClassVar[tuple[str, ...]]

    def flat(self) -> tuple[Any, ...]:
        """Return the values of `NAMES`."""
        raise NotImplementedError

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the values of `TENSORS`."""
        raise NotImplementedError

    @classmethod
    def of_flat(cls: type[FlatT], values: Sequence[Any]) -> FlatT:
        """Return the call for values that begin with its `flat()`."""
        raise NotImplementedError

    def with_tensors(self: FlatT, tensors: Sequence[Tensor | None]) -> FlatT:
        """Return this call with other tensors, in the order of `TENSORS`."""
        raise NotImplementedError

    def without_tensors(self: FlatT) -> FlatT:
        """Return this call without tensors, for a backward whose tensors autograd saves."""
        return self.with_tensors((None,) * len(self.TENSORS)) if self.has_tensors() else self

    def has_tensors(self) -> bool:
        """Return True if any of `TENSORS` is not None."""
        raise NotImplementedError

    @classmethod
    def by_tensor(cls, **values: Any) -> tuple[Any, ...]:
        """Return the values in the order of `TENSORS`; None for those not given."""
        by_tensor = tuple([values.pop(name, None) for name in cls.TENSORS])
        assert not values, f"{cls.__name__} has no tensors {', '.join(values)}"
        return by_tensor


def flattens(cls: type[FlatT]) -> type[FlatT]:
    """Implement the methods of `Flat` for a dataclass (class decorator).

    Treat instances as immutable. The dataclasses are not frozen, which would make construction
    three times as slow.
    """
    leaves = list(_leaves(cls, ""))
    names = [path.rpartition(".")[2] for path, _ in leaves]
    assert len(set(names)) == len(names), f"fields of {cls.__name__} need names of their own"
    tensors = [path for path, type_ in leaves if _TYPES[type_].startswith("Tensor")]
    cls.NAMES = tuple(names)
    cls.TENSORS = tuple(path.rpartition(".")[2] for path in tensors)
    cls.SCHEMA = ", ".join(f"{_TYPES[t]} {n}" for (_, t), n in zip(leaves, names, strict=True))
    index = {path: i for i, (path, _) in enumerate(leaves)}
    tensor_index = {path: i for i, path in enumerate(tensors)}

    def of_values(path: str) -> str:
        return f"values[{index[path]}]"

    def of_tensors(path: str) -> str:
        return f"tensors[{tensor_index[path]}]" if path in tensor_index else f"self.{path}"

    def without_tensors(path: str) -> str:
        own = [of_tensors(p) for p in tensors if p.startswith(f"{path}.")]
        return f"{' is '.join(own)} is None and not self.{path}.has_tensors()"

    scope: dict[str, Any] = {"cls": cls}
    whole, new = _tuple(path for path, _ in leaves), _tuple(tensors)
    source = (
        f"def flat(self): return ({whole})\n"
        f"def tensors(self): return ({new})\n"
        f"def has_tensors(self): return not ({' is '.join(f'self.{p}' for p in tensors)} is None)\n"
        f"def of_flat(values): return {_construction(cls, '', of_values, scope)}\n"
        "def with_tensors(self, tensors): return "
        f"{_construction(cls, '', of_tensors, scope, without_tensors)}\n"
    )
    exec(source, scope)
    for name in ("flat", "tensors", "has_tensors", "with_tensors"):
        setattr(cls, name, scope[name])
    cls.of_flat = staticmethod(scope["of_flat"])  # type: ignore[method-assign]
    return cls


def empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a tensor: the default of backends, and used by fake implementations."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _leaves(cls: type, prefix: str) -> Iterable[tuple[str, Any]]:
    """Yield the paths and types of the fields, depth first."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _leaves(typing.cast(type, hints[field.name]), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name]


def _tuple(paths: Iterable[str]) -> str:
    return "".join(f"self.{path}, " for path in paths)


def _construction(
    cls: type,
    prefix: str,
    value: Callable[[str], str],
    scope: dict[str, Any],
    kept: Callable[[str], str] = lambda path: "",
) -> str:
    """Return the source expression that constructs a `cls`, with value(path) for each leaf.

    Args:
        kept: maps the path of a nested Flat to the condition under which self's object is reused;
            "" for never.
    """
    hints = typing.get_type_hints(cls)
    arguments = []
    for field in dataclasses.fields(cls):
        type_, path = hints[field.name], prefix + field.name
        if not dataclasses.is_dataclass(type_):
            arguments.append(value(path))
            continue
        new = _construction(typing.cast(type, type_), f"{path}.", value, scope, kept)
        condition = kept(path)
        arguments.append(f"self.{path} if {condition} else {new}" if condition else new)
    scope[cls.__name__] = cls
    return f"{cls.__name__}({', '.join(arguments)})"
