"""Dispatch paths from a call to a backend, all of which return bitwise equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fused_attn.ops import dispatch

Route = Callable[[], AbstractContextManager[Any]]


class Watching(TorchDispatchMode):
    """Mode that forwards every operation unchanged, to route calls through torch.library."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def checked_first() -> Iterator[None]:
    """Disable the unchecked fast path within the block, so that every call is validated."""
    nothing = mock.Mock(return_value=None)
    with mock.patch.multiple(dispatch, _try_unchecked=nothing, _try_unchecked_norm=nothing):
        yield


ROUTES: dict[str, Route] = {
    "plain": nullcontext,
    "checked first": checked_first,
    "torch.library": Watching,
}


@pytest.fixture
def looked_at() -> Iterator[list[Any]]:
    """Return a list to which each call that is validated during the test is appended."""
    calls: list[Any] = []

    def spy(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def look(call: Any) -> Any:
            calls.append(call)
            return function(call)

        return look

    with mock.patch.multiple(
        dispatch,
        checked_attention=spy(dispatch.checked_attention),
        checked_norm=spy(dispatch.checked_norm),
    ):
        yield calls
