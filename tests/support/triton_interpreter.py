"""Patches of Triton's interpreter, to match GPU results and run faster; conftest.py applies them.

Bugs in Triton 3.6: tl.dot multiplies bfloat16 operands as their integer encodings, conversions to
bfloat16 truncate instead of rounding, and loop bounds fail with numpy 2.4 and later.

Overheads in Triton 3.6: each call of a device function patches the language module again, every
integer addition is checked for overflow, and each value recomputes the name of its type. The first
two take two thirds of the time. The third takes half of the remaining time.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch


def repair() -> None:
    """Patch the interpreter. Call this function once per process."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def to_float32(data: Any) -> Any:
        return (data.astype(np.uint32) << 16).view(np.float32)

    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, source: Any, type_: Any) -> Any:
        have, want = source.dtype.scalar, type_.scalar
        if want == tl.bfloat16 and have.is_floating():
            wide = torch.from_numpy(np.ascontiguousarray(source.data, dtype=np.float32))
            return handle(wide.to(torch.bfloat16).view(torch.uint16).numpy(), tl.bfloat16)
        if have == tl.bfloat16 and want.is_floating():
            wide = handle(to_float32(source.data), tl.float32)
            return wide if want == tl.float32 else cast(self, wide, type_)
        return cast(self, source, type_)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            handle(to_float32(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        if a.dtype.scalar == tl.float32:
            # The rounding of numpy's float32 matmul depends on its BLAS and the CPU. On some CPUs,
            # results exceeded the contract's limits, although they meet them on other CPUs.
            (d, *_) = rest
            product = a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data
            return handle(product.astype(d.data.dtype), d.dtype.scalar)
        return dot(self, a, b, *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", False)  # frozen
    interpreter._patch_lang = _patched_once(interpreter._patch_lang, tl)
    _cache_types(interpreter, tl.core)


def _cache_types(interpreter: Any, core: Any) -> None:
    """Cache the name, size and numpy type of each Triton type."""
    constexpr, make_block_type, make_tuple = core.constexpr, core.block_type.__init__, core.tuple
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in blocks:
            make_block_type(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return make_tuple([constexpr(n) for n in sizes]), constexpr(math.prod(sizes))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(*(type.shape if type.is_block() else ()))

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values, self.given_type = list(args), type

    def type_of_tuple(self: Any) -> Any:
        given = self.given_type
        if given is None:
            self.given_type = given = core._type_for_tuple_values(self.values)
        elif not isinstance(given, core.tuple_type):
            self.given_type = given = core.tuple_type(given)
        return given

    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor
    make_tuple.__init__ = init_tuple
    make_tuple.type = property(type_of_tuple, lambda self, type: setattr(self, "given_type", type))

    numpy_type = interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    def get_numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type.scalar)
        return numpy_types[name]

    interpreter._get_np_dtype = get_numpy_type


def _patched_once(patch: Any, tl: Any) -> Any:
    """Make `_patch_lang` patch once per launch instead of at each call of a device function."""
    scopes: list[Any] = []
    seen: set[tuple[bool, bool]] = set()

    @functools.cache
    def modules_of(function: Any) -> tuple[bool, bool]:
        values = function.__globals__.values()
        return any(v is tl for v in values), any(v is tl.core for v in values)

    class Launch:
        def restore(self) -> None:
            while scopes:
                scopes.pop().restore()
            seen.clear()

    def patch_once(function: Any) -> Launch:
        modules = modules_of(function)
        if modules not in seen:
            seen.add(modules)
            scopes.append(patch(function))
            tl.core.tensor.__index__ = lambda self: self.handle.data.item()
        return Launch()

    return patch_once
