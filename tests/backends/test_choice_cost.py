"""The choice of a backend is cached, so repeated calls neither read files nor choose again."""

import sys
from unittest import mock

import pytest
import torch
from helpers import deterministic

import fused_attn
from fused_attn.backends import AttentionProblem, registry, select

opened: list[str] = []
counting = False


def note(event: str, args: tuple) -> None:
    if counting and event in ("open", "os.listdir", "os.scandir"):
        opened.append(f"{event} {args[0]}")


sys.addaudithook(note)  # hooks cannot be removed, so all tests share one


@pytest.mark.parametrize("head_dim", [64, 264, 512])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_files_are_read(head_dim, requires_grad, monkeypatch):
    """A repeated call opens no files and lists no folders, for example for package metadata."""
    query = torch.randn(1, 2, 4, head_dim, requires_grad=requires_grad)

    def call():
        return fused_attn.scaled_dot_product_attention(query, query, query, is_causal=True)

    call()
    opened.clear()
    monkeypatch.setitem(globals(), "counting", True)
    call()
    monkeypatch.setitem(globals(), "counting", False)
    assert not opened


def test_settings_that_decide_are_not_cached(monkeypatch):
    """The choice is cached separately for each setting of torch's deterministic mode."""
    problem = AttentionProblem(torch.device("cpu"), torch.float32, 300, 300, needs_grad=True)
    cpp, unsupported = registry.BACKENDS["cpp"], mock.Mock(return_value=["refused"])
    monkeypatch.setattr(cpp, "unsupported", unsupported)
    registry._first_for.cache_clear()
    try:
        for _ in range(2):
            assert select(problem) is not cpp
        unsupported.assert_called_once()
        with deterministic():
            select(problem)
        assert unsupported.call_count == 2
    finally:
        registry._first_for.cache_clear()
