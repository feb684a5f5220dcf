"""The ways that a call can take to a backend: all of them give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from fused_attn.ops import autograd

Route = Callable[[], AbstractContextManager[Any]]


class Watching(TorchDispatchMode):
    """Sees every operation and changes none: calls go through torch.library."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def checked_first() -> Iterator[None]:
    """Within the block no pass gets a call that nobody has looked at."""
    nothing = mock.Mock(return_value=None)
    with mock.patch.multiple(autograd, _try_unchecked=nothing, _try_unchecked_norm=nothing):
        yield


ROUTES: dict[str, Route] = {
    "plain": nullcontext,
    "checked first": checked_first,
    "torch.library": Watching,
}


@contextmanager
def looked_at() -> Iterator[list[Any]]:
    """Within the block, a list of the calls that validation has looked at."""
    calls: list[Any] = []

    def spy(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def look(call: Any) -> Any:
            calls.append(call)
            return function(call)

        return look

    with mock.patch.multiple(
        autograd,
        checked_attention=spy(autograd.checked_attention),
        checked_norm=spy(autograd.checked_norm),
    ):
        yield calls
