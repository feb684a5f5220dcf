"""Regression tests for ordinary calls that once gave wrong results or unclear errors."""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS, device_of
from torch.autograd import forward_ad

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import cpp
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.spec import MaskSpec

X = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_forward_mode_is_not_dropped():
    """Forward-mode derivatives equal torch's, with torch.func.jvp and with dual tensors."""
    x, tangent = torch.randn(2, 1, 2, 5, 8).unbind(0)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.func.jvp(lambda t: sdpa(t, t, t), (x,), (tangent,))
    got = torch.func.jvp(lambda t: F.scaled_dot_product_attention(t, t, t), (x,), (tangent,))
    torch.testing.assert_close(got, want)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        out = forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, dual, dual))
    torch.testing.assert_close(out.tangent, want[1])
    got = torch.func.jvp(lambda t: F.layer_norm(t, 8), (x,), (tangent,))
    want = torch.func.jvp(lambda t: torch.nn.functional.layer_norm(t, (8,)), (x,), (tangent,))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_on_a_kernel_is_refused(backend):
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, backend=backend)

    x = torch.randn(1, 1, 3, 4, device=device_of(backend))
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(attend, (x,), (x,))


def test_hessian():
    def loss(x, backend):
        return F.scaled_dot_product_attention(x, x, x, backend=backend).square().sum()

    hessian, x = torch.func.hessian(loss), torch.randn(1, 1, 3, 2, dtype=torch.float64)
    torch.testing.assert_close(hessian(x, None), hessian(x, "eager"))


def test_gradient_of_an_expanded_float_mask_has_its_shape():
    x = torch.randn(1, 1, 5, 8)
    base = torch.randn(1, 5)
    grads = []
    for function in (F, torch.nn.functional):
        mask = base.clone().requires_grad_().expand(5, 5)
        out = function.scaled_dot_product_attention(x, x, x, mask)
        grads.append(torch.autograd.grad(out[..., 0].sum(), mask)[0])
    torch.testing.assert_close(*grads)
    assert grads[0].abs().sum(1).gt(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [torch.ones, torch.zeros], ids=["bool", "float"])
@pytest.mark.parametrize("shape", [(0, 2, 4, 5), (2, 2, 0, 5), (2, 2, 4, 0)], ids=str)
def test_masks_without_elements(shape, make, backend):
    batch, heads, seqlen_q, seqlen_k = shape
    there = device_of(backend)
    mask = make(batch, 1, seqlen_q, seqlen_k, device=there)
    mask = mask.bool() if make is torch.ones else mask.requires_grad_()
    query = torch.randn(batch, heads, seqlen_q, 8, device=there, requires_grad=True)
    key = torch.randn(batch, heads, seqlen_k, 8, device=there)
    out = F.scaled_dot_product_attention(query, key, key, mask, backend=backend)
    out.sum().backward()
    assert out.shape == query.shape


def test_autocast_casts_before_types_are_compared():
    x = torch.randn(1, 1, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(x, x, x.bfloat16())
    assert out.dtype == torch.bfloat16


def test_out_may_be_changed_in_place():
    """An output without gradients may be changed in place by a tensor that requires grad."""
    x, y = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.no_grad():
        out = F.scaled_dot_product_attention(x, x, x)
    out += y
    out.sum().backward()
    assert y.grad.eq(1).all()


@pytest.mark.parametrize(
    ("call", "tensor"),
    [
        (lambda t: F.scaled_dot_product_attention(t, t, t), X),
        (lambda t: F.layer_norm(t, 8), X),
        (lambda t: F.scaled_dot_product_attention(X, X, X, t), torch.randn(5, 5)),
        (lambda t: F.scaled_dot_product_attention(X, X, X, masks.alibi(t)), torch.rand(2)),
        (
            lambda t: F.varlen_attention(*torch.ones(3, 9, 2, 8), torch.tensor([0, 4, 9]), t, 5, 5),
            torch.tensor([0, 4, 9]),
        ),
    ],
    ids=["attention", "norm", "mask", "slopes", "cu_seqlens"],
)
def test_lazily_negated_tensors(call, tensor):
    lazy = torch._neg_view(-tensor)
    assert lazy.is_neg() and torch.equal(call(lazy), call(tensor))


def test_direct_calls_of_the_ops_are_checked():
    def call(query, key, value, dropout_p=0.0, **fields):
        options = AttentionOptions(1.0, 0.0, dropout_p)
        call = AttentionCall(query, key, value, MaskSpec(**fields), options)
        return torch.ops.fused_attn.attention_fwd(*call.flat(), False, False, "cpp")

    x = torch.randn(1, 2, 4, 8)
    call(x, x, x)
    packed = {
        "cu_seqlens_q": torch.tensor([0, 4]),
        "cu_seqlens_k": torch.tensor([0, 5]),
        "bounds": torch.zeros(1, 8, dtype=torch.int64),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
    }
    for bad in (
        lambda: call(x, x[:, :0], x[:, :0]),
        lambda: call(x, torch.randn(1, 2, 9, 8), x),
        lambda: call(x[0], x, x),
        lambda: call(x, x, x, dropout_p=0.5),
        lambda: call(x, x, x, **packed),
        lambda: call(x, x, x, **packed | {"bounds": None}),
    ):
        with pytest.raises(ValueError, match="must"):
            bad()
    with pytest.raises(TypeError):
        cpp._cpu.set_isa(None)


def test_float64_mask_of_another_type_is_refused():
    x = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match="attn_mask must not be float64"):
        F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5, dtype=torch.float64))


def test_nested_and_sparse_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    for tensor in (nested, torch.eye(8).to_sparse()):
        with pytest.raises(TypeError, match="must be a dense tensor"):
            F.scaled_dot_product_attention(tensor, tensor, tensor)


def test_lengths_in_a_list_are_on_the_cpu():
    """Lengths in a list become a CPU tensor even if torch's default device is another one."""
    with torch.device("meta"):
        mask = masks.padding([3, 5])
    assert mask.paddings[0].key_lengths.device.type == "cpu"
