"""Many gradients in one backward: is_grads_batched and torch.vmap of torch.autograd.grad.

tests/ops/test_gradcheck.py covers more masks and options.
"""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import BACKENDS, leaves_of, most_exact, random_qkv
from torch.autograd.gradcheck import gradcheck, gradgradcheck

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.nn.weights import attention_with_weights

TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 1e-4)}


# Each function returns a function of tensors, and the tensors.


def of_attention(backend):
    tensors = [*random_qkv(2, 2, 1, 5, 6, 4).values(), torch.randn(1, 2, 5, 6)]

    def attend(query, key, value, bias):
        torch.manual_seed(1)
        mask = masks.bias(bias) & masks.padding([6, 4]).to(bias.device)
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.2, enable_gqa=True, return_lse=True, backend=backend
        )

    return attend, leaves_of(tensors, most_exact(backend), backend)


def of_weights(backend, average):
    tensors = [*random_qkv(2, 2, 2, 5, 6, 4).values(), torch.randn(1, 2, 5, 6)]

    def attend(query, key, value, bias):
        return attention_with_weights(
            query, key, value, masks.bias(bias), average=average, backend=backend
        )

    return attend, leaves_of(tensors, most_exact(backend), backend)


def of_norm(backend, rms):
    tensors = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)

    def norm(input, residual, weight):
        torch.manual_seed(1)
        return (F.rms_norm if rms else F.layer_norm)(
            input, 6, weight,
            residual=residual, dropout_p=0.2, return_residual=True, backend=backend,
        )  # fmt: skip

    return norm, leaves_of(tensors, most_exact(backend), backend)


FUNCTIONS = {
    "attention": of_attention,
    "weights": functools.partial(of_weights, average=False),
    "average": functools.partial(of_weights, average=True),
    "layer_norm": functools.partial(of_norm, rms=False),
    "rms_norm": functools.partial(of_norm, rms=True),
}


def assert_same(got, want):
    for one, two in zip(got, want, strict=True):
        rtol, atol = TOLERANCES[one.dtype]
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol)


@pytest.mark.thinned("covered by create_graph=True", create_graph=[False])
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_is_that_of_its_own_backward(name, create_graph, backend):
    """Gradients of a batched backward equal those of one backward per output gradient."""
    function, leaves = FUNCTIONS[name](backend)
    outputs = function(*leaves)
    grads = [torch.randn(3, *o.shape, dtype=o.dtype, device=o.device) for o in outputs]
    options = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    alone = [
        torch.autograd.grad(outputs, leaves, row, **options) for row in zip(*grads, strict=True)
    ]
    want = [torch.stack(of_leaf) for of_leaf in zip(*alone, strict=True)]
    got = torch.autograd.grad(outputs, leaves, grads, is_grads_batched=True, **options)
    assert_same(got, want)
    if not create_graph:
        mapped = torch.vmap(lambda *row: torch.autograd.grad(outputs, leaves, row, **options))
        assert_same(mapped(*grads), want)
        return
    second = [
        torch.autograd.grad(sum(t.square().sum() for t in first), leaves, retain_graph=True)
        for first in (got, want)
    ]
    assert_same(*second)


def test_enabled():
    """Batched gradients of torch's function are correct while fused_attn.enabled() patches it."""
    inputs = tuple(torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).requires_grad_().unbind())
    attend = torch.nn.functional.scaled_dot_product_attention
    with fused_attn.enabled():
        assert gradcheck(attend, inputs, check_batched_grad=True)
        assert gradgradcheck(attend, inputs, check_batched_grad=True, fast_mode=True)
