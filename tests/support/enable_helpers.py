"""Recorders of the attention calls that this package computes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fused_attn
from fused_attn import functional

OP = "aten::scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """After the test, call disable() and check that torch's dispatch is unchanged."""
    before = torch._C._dispatch_dump_table(OP)
    yield
    fused_attn.disable()
    assert torch._C._dispatch_dump_table(OP) == before


def spy_on_masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each later call of this package's attention appends its attn_mask.

    A call with both a mask and is_causal fails, because callers must combine them into one mask.
    """
    seen: list[Any] = []
    attend = functional.scaled_dot_product_attention

    def spy(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        assert not is_causal or attn_mask is None
        seen.append(attn_mask)
        return attend(q, k, v, attn_mask, dropout_p, is_causal, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return seen


@contextlib.contextmanager
def counting() -> Iterator[list[tuple[float, Any]]]:
    """Yield a list of (dropout_p, attn_mask) of the calls that this package's attention computes.

    Calls that raise an exception are not in the list.
    """
    computed: list[tuple[float, Any]] = []
    attention = functional.scaled_dot_product_attention

    def recording(*args: Any, **kwargs: Any) -> Any:
        out = attention(*args, **kwargs)
        computed.append((args[4], args[3]))
        return out

    with mock.patch.object(functional, "scaled_dot_product_attention", recording):
        yield computed


@contextlib.contextmanager
def taken_over() -> Iterator[list[tuple[float, Any]]]:
    """Record calls like `counting()`, within `fused_attn.enabled()`."""
    with fused_attn.enabled(), counting() as computed:
        yield computed


@contextlib.contextmanager
def functions_called(*names: str) -> Iterator[list[str]]:
    """Yield a list to which each call of one of the named functions appends the function's name."""
    seen: list[str] = []

    def spied(name: str) -> Any:
        function = getattr(fused_attn, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return mock.patch.object(sys.modules[function.__module__], name, spy)

    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(spied(name))
        yield seen


def attention_calls() -> contextlib.AbstractContextManager[list[str]]:
    """Yield a list to which each attention call, on padded or packed input, appends its name."""
    return functions_called("scaled_dot_product_attention", "varlen_attention")
