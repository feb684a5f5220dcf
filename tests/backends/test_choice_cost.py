"""The choice of a backend is cached, so repeated calls neither read files nor choose again."""

import sys

import pytest
import torch
from helpers import deterministic

import fused_attn

opened: list[str] = []
counting = False
# Python audit events for access to files.
FILES = ("open", "os.listdir", "os.scandir")


def note(event: str, args: tuple) -> None:
    if counting and event in FILES:
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
    """Backend selection is cached separately for each setting of torch's deterministic mode."""
    from fused_attn.backends import AttentionProblem, registry, select

    problem = AttentionProblem(torch.device("cpu"), torch.float32, 300, 300, needs_grad=True)
    seen = []
    cpp = registry.BACKENDS["cpp"]
    monkeypatch.setattr(cpp, "unsupported", lambda given: (seen.append(1), ["refused"])[1])
    registry._first_for.cache_clear()
    try:
        for _ in range(2):
            assert select(problem) is not cpp
        assert len(seen) == 1
        with deterministic():
            select(problem)
        assert len(seen) == 2
    finally:
        registry._first_for.cache_clear()
