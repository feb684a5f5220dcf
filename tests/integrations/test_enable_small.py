"""Under enable(), tiny calls stay on torch's own kernels, which finish sooner."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused_attn
from fused_attn.backends.cpp import CppBackend

pytestmark = pytest.mark.small_calls


@pytest.fixture
def lengths(monkeypatch):
    """seqlen_q of the calls that our kernels computed under enable()."""
    seen, run = [], CppBackend.attention_fwd

    def attention_fwd(self, call, for_backward, want_lse):
        outputs = run(self, call, for_backward, want_lse)
        if outputs is not None:
            seen.append(call.query.shape[2])
        return outputs

    monkeypatch.setattr(CppBackend, "attention_fwd", attention_fwd)
    with fused_attn.enabled():
        yield seen


def qkv(*shape, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_which_calls_are_left_to_torch(lengths):
    small, large = qkv(1, 4, 32, 16), qkv(2, 4, 128, 32)
    visible = torch.ones(32, 32, dtype=torch.bool)
    F.scaled_dot_product_attention(*small)
    F.scaled_dot_product_attention(*small, is_causal=True)
    with torch.no_grad():
        F.scaled_dot_product_attention(*qkv(1, 4, 1, 16))
    assert lengths == []
    F.scaled_dot_product_attention(*large)
    F.scaled_dot_product_attention(*small, attn_mask=visible.float().log())
    F.scaled_dot_product_attention(*small, dropout_p=0.1)
    F.scaled_dot_product_attention(*qkv(1, 4, 31, 16, dtype=torch.bfloat16))
    with torch.no_grad():
        F.scaled_dot_product_attention(*qkv(1, 4, 30, 16))
    assert lengths == [128, 32, 32, 31, 30]
    lengths.clear()
    with fused_attn.use_backend("cpp"):
        F.scaled_dot_product_attention(*small)
    key, value = (torch.randn(1, 4, 40, 16) for _ in range(2))
    value[:, :, 32:] = float("nan")  # which no query sees
    out = F.scaled_dot_product_attention(small[0], key, value, is_causal=True)
    assert lengths == [32, 32] and out.isfinite().all()


def test_results_are_torchs():
    tensors = qkv(1, 4, 32, 16)

    def step():
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        return out, *torch.autograd.grad(out.sum(), tensors)

    want = step()
    with fused_attn.enabled():
        got = step()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("size", [(2, 1, 1, 32), (1, 1, 32, 32), (32, 32), (2, 4, 32, 32)])
def test_masked_training_is_left_to_torch(lengths, size):
    query, key, value = qkv(2, 4, 32, 16)
    visible = torch.rand(size) > 0.5
    visible[..., -1] = True
    out = F.scaled_dot_product_attention(query, key, value, visible)
    assert lengths == []
    fused_attn.disable()
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, visible))
    with torch.no_grad(), fused_attn.enabled():
        F.scaled_dot_product_attention(query, key, value, visible.expand(2, 4, 32, 32))
    assert lengths == [32]


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_values_behind_a_mask_that_torch_lets_through(lengths, hidden, which):
    tensors = qkv(2, 4, 32, 16)
    visible = (torch.arange(32) < 20).expand(2, 1, 32, 32)
    with torch.no_grad():
        tensors[which][1, 2, 25, 3] = hidden
    out = F.scaled_dot_product_attention(*tensors, visible)
    assert lengths == [32] and out[:, :, :20].isfinite().all()


def test_a_scale_that_lets_masked_scores_overflow(lengths):
    query, key, value = qkv(2, 4, 32, 16)
    visible = (torch.arange(32) < 20).expand(2, 1, 32, 32)
    with torch.no_grad():
        query.fill_(1e4)
        key[:, :, :20], key[:, :, 20:] = 0.0, 1e4
    out = F.scaled_dot_product_attention(query, key, value, visible, scale=1e35)
    assert lengths == [32] and out.isfinite().all()


def test_rows_without_keys_are_ours(lengths):
    visible = torch.ones(2, 1, 32, 32, dtype=torch.bool)
    visible[1, 0, 7] = False
    out = F.scaled_dot_product_attention(*qkv(2, 4, 32, 16), visible)
    assert lengths == [32] and not out[1, :, 7].any()
