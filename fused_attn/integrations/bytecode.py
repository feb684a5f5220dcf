"""Code objects of functions, which integrations inspect; classes made by exec have no source."""

from __future__ import annotations

import types
from collections.abc import Iterator


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of its nested functions and comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)
