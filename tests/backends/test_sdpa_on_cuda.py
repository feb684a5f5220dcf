"""What the backend "sdpa" leaves to torch on CUDA, seen without a GPU.

By tensors that have no values, and by a kernel of the CPU that gets what those of CUDA get.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import random_qkv
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_attn as fa
from fused_attn.backends import AttentionProblem, get_backend, sdpa


@pytest.mark.parametrize("is_causal", [False, True])
def test_lse_on_cuda(is_causal, monkeypatch):
    """torch's flash attention gives it there. Without a GPU: tensors have no values."""
    flash, given = torch.ops.aten._scaled_dot_product_flash_attention, []

    def noted(query, key, value, *options, scale):
        given.append((key.shape, value.shape, *options, scale))
        return flash(query, key, value, *options, scale=scale)

    monkeypatch.setattr(sdpa, "_aten", SimpleNamespace(_scaled_dot_product_flash_attention=noted))
    with FakeTensorMode():
        there = {"device": "cuda", "dtype": torch.bfloat16}
        q, (k, v) = torch.empty(2, 4, 33, 32, **there), torch.empty(2, 2, 2, 33, 32, **there)
        options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True, "return_lse": True}
        out, lse = fa.scaled_dot_product_attention(q, k, v, backend="sdpa", **options)
    assert given == [((2, 4, 33, 32), (2, 4, 33, 32), 0.0, is_causal, False, 0.3)]
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 33), torch.float32, "cuda")


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, None),
        ({"mask": "causal"}, None),
        ({"mask": "causal", "seqlen_k": 47}, "aligns causal masks otherwise"),
        ({"mask": "causal", "seqlen_q": 0, "seqlen_k": 0}, "aligns causal masks otherwise"),
        ({"mask": "dense"}, "gives no lse with a mask on cuda"),
        ({"dtype": torch.float32}, "gives no lse of torch.float32 on cuda"),
        ({"head_dim": 36, "head_dim_v": 36}, "gives no lse of head_dim 36 on cuda"),
        ({"head_dim_v": 40}, "gives no lse where head_dim_v is not head_dim"),
        ({"dropout": True}, "gives no lse with dropout"),
        ({"needs_grad": True}, "has no gradient of lse"),
    ],
    ids=str,
)
def test_what_has_lse_on_cuda(properties, reason):
    sizes = {"head_dim": 32, "head_dim_v": 32, "seqlen_q": 33, "seqlen_k": 33, "result": "lse"}
    properties = {"device": torch.device("cuda"), "dtype": torch.bfloat16, **sizes, **properties}
    reasons = get_backend("sdpa").unsupported(AttentionProblem(**properties))
    assert not reasons if reason is None else reason in reasons[0]


@pytest.mark.parametrize("num_heads_kv", [4, 2])
def test_any_order_where_torch_pads(num_heads_kv, monkeypatch):
    """On CUDA torch pads head_dim to a multiple of 8, and its kernels see that many columns; some
    want as many heads of keys."""
    kernel, seen = sdpa.attend, []

    def attend(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
        dim, group = query.shape[3], query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        padded = [F.pad(t, (0, -dim % 8)) for t in (query, key, value)]
        seen.append(padded[0].shape[3])
        scale = dim**-0.5 if scale is None else scale
        return kernel(*padded, mask, dropout_p, is_causal, scale=scale)[..., :dim]

    monkeypatch.setattr(sdpa, "attend", attend)
    shape = 2, 4, num_heads_kv, 33, 47, 20
    q, k, v = (t.requires_grad_() for t in random_qkv(*shape).values())
    given = torch.randn(2, 4, 33, 20)

    def gradients(backend):
        options = {"is_causal": True, "enable_gqa": True, "backend": backend}
        out = fa.scaled_dot_product_attention(q, k, v, **options)
        return torch.autograd.grad(out, (q, k, v), given)

    for got, expected in zip(gradients("sdpa"), gradients("eager"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert seen == [24]
