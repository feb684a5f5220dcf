"""enable() and enabled() return counts of calls by shape, reason and call site."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_attn


def attend(*shape, **options):
    x = torch.randn(shape)
    return F.scaled_dot_product_attention(x, x, x, **options)


@pytest.fixture(autouse=True)
def _disabled():
    yield
    fused_attn.disable()


def reasons(counts):
    return {kind.reason: count for kind, count in counts.kinds.items()}


def test_shapes_and_reasons():
    with fused_attn.enabled() as counts:
        for _ in range(3):
            attend(2, 4, 9, 8)
        with sdpa_kernel(SDPBackend.MATH):
            attend(2, 4, 9, 8)
        with fused_attn.use_backend("eager"):
            attend(2, 4, 9, 8)
    assert (counts.fused, counts.left_to_torch) == (3, 2)
    assert reasons(counts) == {
        "": 3,
        "FLASH_ATTENTION is disabled by torch.nn.attention.sdpa_kernel or enable_flash_sdp": 1,
        "backend eager is requested": 1,
    }
    text = str(counts)
    assert text.splitlines()[0] == "3 calls fused, 2 left to torch"
    assert "query (2, 4, 9, 8), 9 keys  fused" in text
    attend(2, 4, 9, 8)
    assert counts.fused == 3, "a call after the block is counted"


def test_enable_counts_until_disable():
    counts = fused_attn.enable()
    assert fused_attn.enable() is counts
    attend(2, 4, 9, 8)
    with fused_attn.enabled() as inner:
        attend(2, 4, 9, 8)
    assert (counts.fused, inner.fused) == (2, 1)
    counts.reset()
    assert counts.fused == 0
    fused_attn.disable()
    assert fused_attn.enable() is not counts


def test_invalid_calls_have_a_reason():
    x, y = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 7)
    with fused_attn.enabled() as counts, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(x, y, y)
    (reason,) = reasons(counts)
    assert "key must have head_dim 8" in reason


def test_call_sites():
    with fused_attn.enabled(call_sites=True) as counts:
        attend(2, 4, 9, 8)
        torch.nn.MultiheadAttention(16, 2)(*[torch.randn(3, 2, 16)] * 3, need_weights=False)
    sites = [kind.site for kind in counts.kinds]
    assert len(set(sites)) == 2 and all("test_enable_counts.py:" in site for site in sites)


def test_graphs_are_not_counted():
    with fused_attn.enabled() as counts:
        torch.compile(attend, backend="aot_eager")(2, 4, 9, 8)
    assert not counts.kinds
