"""Regression tests for ordinary calls that once gave wrong results or unclear errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import BACKENDS, device_of
from torch.autograd import forward_ad

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import cpp
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.spec import MaskSpec


def test_forward_mode_is_not_dropped():
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
    def loss(x):
        return F.scaled_dot_product_attention(x, x, x).square().sum()

    def eager(x):
        return F.scaled_dot_product_attention(x, x, x, backend="eager").square().sum()

    x = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    torch.testing.assert_close(torch.func.hessian(loss)(x), torch.func.hessian(eager)(x))


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
    x, y = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.no_grad():
        out = F.scaled_dot_product_attention(x, x, x)
    out += y
    out.sum().backward()
    assert y.grad.eq(1).all()


def test_lazy_negation_is_seen():
    lazy = torch.randn(5, 5, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    plain = lazy.resolve_neg()
    x = torch.randn(1, 1, 5, 8)
    assert torch.equal(
        F.scaled_dot_product_attention(x, x, x, lazy),
        F.scaled_dot_product_attention(x, x, x, plain),
    )
    x = torch._neg_view(torch.randn(1, 1, 5, 8))
    assert torch.equal(
        F.scaled_dot_product_attention(x, x, x),
        F.scaled_dot_product_attention(*[x.resolve_neg()] * 3),
    )
    assert torch.equal(F.layer_norm(x, 8), F.layer_norm(x.resolve_neg(), 8))


def test_masks_of_lazily_negated_tensors():
    """Lazily negated ALiBi slopes and cu_seqlens give the same results as materialized ones."""
    x, packed = torch.randn(1, 2, 5, 8), torch.randn(9, 2, 8)
    slopes, starts = torch.tensor([0.5, 2.0]), torch.tensor([0, 4, 9])
    assert torch.equal(
        F.scaled_dot_product_attention(x, x, x, masks.alibi(torch._neg_view(-slopes))),
        F.scaled_dot_product_attention(x, x, x, masks.alibi(slopes)),
    )
    assert torch.equal(
        F.varlen_attention(packed, packed, packed, starts, torch._neg_view(-starts), 5, 5),
        F.varlen_attention(packed, packed, packed, starts, starts, 5, 5),
    )


def test_direct_calls_of_the_ops_are_checked():
    def call(query, key, value, **options):
        spec = replace(MaskSpec(), **options.get("spec", {}))
        call = AttentionCall(
            query, key, value, spec, AttentionOptions(1.0, 0.0, options.get("dropout_p", 0.0))
        )
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
        lambda: call(x, x, x, spec=packed),
        lambda: call(x, x, x, spec=packed | {"bounds": None}),
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
    with torch.device("meta"):
        mask = masks.padding([3, 5])
    assert mask.paddings[0].key_lengths.device.type == "cpu"
