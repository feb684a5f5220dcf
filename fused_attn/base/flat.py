"""Conversion between nested dataclasses and the flat argument lists of torch.library ops."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

FlatT = TypeVar("FlatT", bound="Flat")
ResultsT = TypeVar("ResultsT", bound=Any)  # a NamedTuple

# Metadata that excludes a field from flattening. Copies keep the value of such a field, unless it
# has init=False. `of_flat` sets the default.
HOST = {"host": True}

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    bool: "bool",
}


class Flat:
    """Base class of dataclasses that convert to a flat argument list for torch.library ops.

    The list has the values of the fields in order, except those with the metadata HOST, which must
    come last. A nested Flat is replaced by its fields. The decorator `flattens` generates the
    conversions from the fields, once per class, so adding a field needs no other change.

    Attributes:
        NAMES: names of all flattened fields.
        TENSORS: names of the fields that are a tensor or an optional tensor.
        SCHEMA: the fields as parameters of a torch.library schema.
        DIFFERENTIABLE: names of the differentiable tensors, in the order of the gradients that the
            backward op returns.
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
        """Construct an object from a list that starts with the values of its `flat()`."""
        raise NotImplementedError

    def with_tensors(self: FlatT, tensors: Sequence[Tensor | None]) -> FlatT:
        """Return a copy with other tensors, in the order of `TENSORS`; missing ones are None.

        An autograd.Function stores a copy without tensors on ctx, and saves the tensors separately.
        """
        raise NotImplementedError

    @classmethod
    def by_tensor(cls, **values: Any) -> tuple[Any, ...]:
        """Return the keyword arguments as a tuple in the order of `TENSORS`, None if missing."""
        by_tensor = tuple([values.pop(name, None) for name in cls.TENSORS])
        assert not values, f"{cls.__name__} has no tensors {', '.join(values)}"
        return by_tensor


def flattens(cls: type[FlatT]) -> type[FlatT]:
    """Generate the methods of `Flat` for a dataclass (class decorator).

    The dataclasses are not frozen, because construction of a frozen dataclass takes three times as
    long.
    """
    leaves = list(_leaves(cls, ""))
    names = [path.rpartition(".")[2] for path, _ in leaves]
    assert len(set(names)) == len(names), f"fields of {cls.__name__} must have distinct names"
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

    def has_none(path: str) -> str:
        own = [p for p in tensors if p.startswith(f"{path}.")]
        return f"{' is '.join([*map(of_tensors, own), *(f'self.{p}' for p in own)])} is None"

    scope: dict[str, Any] = {"cls": cls}
    whole, new = _tuple(path for path, _ in leaves), _tuple(tensors)
    source = (
        f"def flat(self): return ({whole})\n"
        f"def tensors(self): return ({new})\n"
        f"def of_flat(values): return {_construction(cls, '', of_values, scope)}\n"
        "def with_tensors(self, tensors):\n"
        f" tensors = (*tensors, *(None,) * ({len(tensors)} - len(tensors)))\n"
        f" return {_construction(cls, '', of_tensors, scope, has_none, with_host=True)}\n"
    )
    exec(source, scope)
    for name in ("flat", "tensors", "with_tensors"):
        setattr(cls, name, scope[name])
    cls.of_flat = staticmethod(scope["of_flat"])  # type: ignore[method-assign]
    return cls


# Function of shape, strides, dtype and device that allocates an uninitialized tensor.
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], Tensor]


def empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate an uninitialized tensor with torch. This is the default allocator of calls."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def or_empty(results: ResultsT, like: Tensor, **dtypes: torch.dtype) -> ResultsT:
    """Replace results that are None by empty tensors of these dtypes, on the device of `like`."""
    missing = {n: like.new_empty(0, dtype=dtypes[n]) for n in dtypes if getattr(results, n) is None}
    return results._replace(**missing)


def _leaves(cls: type, prefix: str) -> Iterable[tuple[str, Any]]:
    """Yield the dotted path and the type of each field, depth first."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "host" in field.metadata:
            continue
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
    with_host: bool = False,
) -> str:
    """Return Python source that constructs a `cls`, with value(path) for each leaf field.

    Args:
        prefix: path of the object to construct, with a trailing dot; "" for the outermost.
        value: returns the source expression of a leaf, for its path.
        scope: globals of the generated source; receives the classes.
        kept: returns the source of the condition under which self's nested Flat at a path is
            reused; "" if it never is.
        with_host: copy the fields with the metadata HOST from self.
    """
    hints = typing.get_type_hints(cls)
    arguments = []
    for field in dataclasses.fields(cls):
        type_, path = hints[field.name], prefix + field.name
        if "host" in field.metadata:
            if with_host and field.init:
                arguments.append(f"{field.name}=self.{path}")
            continue
        if not dataclasses.is_dataclass(type_):
            arguments.append(value(path))
            continue
        nested = typing.cast(type, type_)
        new = _construction(nested, f"{path}.", value, scope, kept, with_host)
        condition = kept(path)
        arguments.append(f"self.{path} if {condition} else {new}" if condition else new)
    scope[cls.__name__] = cls
    return f"{cls.__name__}({', '.join(arguments)})"
