"""Redirection of attention calls, which `distributed.context_parallel` uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fused_attn.call.unchecked import UncheckedAttention

# Receives an unchecked call, want_lse and the name of the requested backend; returns out and lse,
# which may be None if not wanted.
Handler = Callable[["UncheckedAttention", bool, "str | None"], tuple[Tensor, Tensor | None]]

handler: Handler | None = None  # computes all attention calls, if set


@contextlib.contextmanager
def redirected(to: Handler) -> Iterator[None]:
    """Compute all attention calls of the process by a handler within the block."""
    global handler
    before, handler = handler, to
    try:
        yield
    finally:
        handler = before


@contextlib.contextmanager
def not_redirected() -> Iterator[None]:
    """Compute attention calls as usual within the block, as a handler needs it."""
    global handler
    before, handler = handler, None
    try:
        yield
    finally:
        handler = before
