"""Makes Triton's interpreter compute what a GPU does; tests/conftest.py asks for it.

Seen in Triton 3.6: bfloat16 operands of a product are multiplied as the integers that hold them,
conversions to bfloat16 are cut off instead of rounded, and loop bounds fail with numpy 2.4 and
later. Besides, the language is patched anew in each call of a device function, and every addition
of integers is checked for overflow; without the two it is three times as fast.
"""

from __future__ import annotations

from typing import Any

import torch


def repair() -> None:
    """Patches the interpreter; to be called once a process."""
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
            # numpy's products round as its BLAS for this processor does, which is no GPU's way, and
            # on some took results over the contract's limit that are within it elsewhere.
            (d, *_) = rest
            product = a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data
            return handle(product.astype(d.data.dtype), d.dtype.scalar)
        return dot(self, a, b, *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", False)  # frozen
    interpreter._patch_lang = _patched_once(interpreter._patch_lang, tl)


def _patched_once(patch: Any, tl: Any) -> Any:
    """`_patch_lang` for a whole launch: device functions find the language patched already."""
    scopes: list[Any] = []
    seen: set[tuple[bool, bool]] = set()

    class Launch:
        def restore(self) -> None:
            while scopes:
                scopes.pop().restore()
            seen.clear()

    def patch_once(function: Any) -> Launch:
        values = function.__globals__.values()
        modules = (any(v is tl for v in values), any(v is tl.core for v in values))
        if modules not in seen:
            seen.add(modules)
            scopes.append(patch(function))
            tl.core.tensor.__index__ = lambda self: self.handle.data.item()
        return Launch()

    return patch_once
