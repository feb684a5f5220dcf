"""First- and second-order gradients, checked by torch's gradcheck and gradgradcheck in float64.

The last two tests check second-order gradients of backends without float64.
"""

import pytest
import torch
from helpers import BACKENDS, FLOAT64_BACKENDS, assert_like_eager, attention, random_qkv
from mask_cases import MASKS
from norm_cases import norm, tensors_of
from torch.autograd import gradcheck, gradgradcheck

from fused_attn import functional as F
from fused_attn import masks

SHAPE = (2, 2, 5, 7)  # batch, heads, seqlen_q, seqlen_k


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    )


def finite(lse):
    return lse.masked_fill(lse.isinf(), 0.0)


@pytest.mark.sampled(
    "other masks cover softcap and dropout",
    name=["causal", "ragged", "alibi", "bias_with_inf"],
    options=[{"softcap": 1.5}, {"dropout_p": 0.4}],
)
@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"dropout_p": 0.4}], ids=str)
@pytest.mark.parametrize(
    ("name", "fast"),
    [
        (None, True),
        # A full second-order check takes half a minute. Fast mode checks random projections.
        pytest.param(None, False, marks=pytest.mark.thorough),
        *((name, True) for name in ("causal", "ragged", "dense", "alibi", "bias_with_inf")),
    ],
)
def test_attention(name, fast, options, backend):
    mask = None if name is None else MASKS[name](*SHAPE)

    def run(query, key, value, bias):
        torch.manual_seed(2)
        whole = masks.bias(bias) if mask is None else mask & masks.bias(bias)
        out, lse = F.scaled_dot_product_attention(
            query, key, value, whole, enable_gqa=True, return_lse=True, backend=backend, **options
        )
        return out, finite(lse)

    inputs = leaves((2, 2, 5, 3), (2, 1, 7, 3), (2, 1, 7, 4), (2, 1, 5, 7))
    assert gradcheck(run, inputs, check_batched_grad=True)
    assert gradgradcheck(run, inputs, fast_mode=fast)  # batched: test_batched_gradients.py


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_norm(rms, residual, dropout_p, backend):
    def run(input, weight, *rest):
        torch.manual_seed(2)
        options = {"dropout_p": dropout_p, "return_residual": True, "backend": backend}
        options["residual"] = rest[0].transpose(0, 1) if residual else None
        if rms:
            return F.rms_norm(input[:, 1:], 6, weight, 1e-6, **options)
        return F.layer_norm(input[:, 1:], 6, weight, rest[-1], **options)

    shapes = [(2, 3, 6), (6,)] + [(2, 2, 6)] * residual + [(6,)] * (not rms)
    assert gradcheck(run, leaves(*shapes), check_batched_grad=True)
    assert gradgradcheck(run, leaves(*shapes), check_batched_grad=True)


@pytest.mark.parametrize("backend", [*FLOAT64_BACKENDS, None])  # None: also small calls
def test_layer_norm_with_a_bias_alone(backend):
    """A layer norm with bias but without weight has second derivatives, unlike in torch 2.13."""

    def run(input, bias):
        return F.layer_norm(input, 6, None, bias, backend=backend)

    assert gradgradcheck(run, leaves((2, 3, 6), (6,)))


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
def test_some_inputs_without_gradient(backend):
    """Second-order gradients exist if query, key or value does not require grad."""
    for frozen in range(3):
        inputs = leaves(*[(1, 1, 4, 3)] * 3)
        inputs[frozen].requires_grad_(False)
        loss = F.scaled_dot_product_attention(*inputs, backend=backend).square().sum()
        wanted = [t for t in inputs if t.requires_grad]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
def test_third_order(backend):
    (x,) = leaves((1, 1, 3, 2))

    def third(use):
        y = F.scaled_dot_product_attention(x, x, x, backend=use).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            y = grad.square().sum()
        return y

    torch.testing.assert_close(third(backend), third("eager"))


def gradients_of(function):
    """Return function(backend) that computes the gradients of a loss on a function's outputs."""

    def of(backend):
        def call(**leaves):
            loss = sum(finite(output).square().sum() for output in function(backend)(**leaves))
            return torch.autograd.grad(loss, tuple(leaves.values()), create_graph=True)

        return call

    return of


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_second_order_of_attention(dropout_p, backend):
    """Second-order gradients are within the numerics contract, with and without dropout."""
    tensors = random_qkv(2, 4, 2, 20, 50, 16)
    tensors["bias"] = torch.randn(1, 4, 20, 50, generator=torch.Generator().manual_seed(1))
    function = attention(MASKS["ragged"](2, 4, 20, 50), dropout_p=dropout_p, enable_gqa=True)
    assert_like_eager(gradients_of(function), tensors, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_second_order_of_norms(kind, backend):
    tensors = tensors_of(kind, (30, 40), True, True)
    assert_like_eager(gradients_of(norm(kind, dropout_p=0.3)), tensors, torch.float32, backend)
