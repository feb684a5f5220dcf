"""Dropout masks do not change if torch.compile recomputes a forward under a memory budget."""

import pytest
import torch
from torch._functorch import config

import fused_attn
from fused_attn import functional as F


def attention(x, weight, **kwargs):
    heads = x.view(2, 24, 4, 16).transpose(1, 2)
    query, key = heads.sin(), heads.cos()  # recomputed if the budget is small
    return F.scaled_dot_product_attention(query, key, heads * weight, dropout_p=0.5, **kwargs)


def attention_twice(x, weight):
    once, again = attention(x.detach(), weight), attention(x.detach(), weight)
    return once - again  # 0 if both calls have the same seed


def varlen(x, weight):
    tokens = x.view(48, 4, 16)
    cu_seqlens = torch.tensor([0, 30, 48], dtype=torch.int32)
    rest = cu_seqlens, cu_seqlens, 30, 30
    return fused_attn.varlen_attention(
        tokens.sin(), tokens.cos(), tokens * weight, *rest, dropout_p=0.5
    )


def layer_norm(x, weight):
    x = x.view(-1, 16)
    return F.layer_norm(x.sin(), 16, weight, residual=x, dropout_p=0.5)


def rms_norm(x, weight):
    return F.rms_norm(x.view(-1, 16).sin(), 16, weight, dropout_p=0.5)


def check_compiled(function, budget, backend):
    """Assert that forward and backward of a compiled function drop the same weights.

    The function is linear in `weight`. With the same dropout mask in forward and backward, and out
    as output gradient, <out, out> therefore equals <weight, grad_weight>.
    """
    torch._dynamo.reset()
    torch.manual_seed(1)
    x, weight = (torch.randn(n).double().requires_grad_() for n in (2 * 24 * 64, 16))
    with config.patch(activation_memory_budget=budget):
        out = torch.compile(function, backend=backend, fullgraph=True)(x, weight)
        out.backward(out.detach())
    by_out, by_weight = out.square().sum(), (weight * weight.grad).sum()
    assert by_out.abs() > 0.1
    torch.testing.assert_close(by_weight, by_out)


# For each function, a budget at which it once failed. test_all_budgets covers more budgets.
@pytest.mark.parametrize(
    ("function", "budget"),
    [(attention_twice, 0.0), (varlen, 0.7), (layer_norm, 0.0), (rms_norm, 0.9)],
)
def test_budget(function, budget):
    check_compiled(function, budget, "aot_eager")


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("function", [attention_twice, varlen, layer_norm, rms_norm])
def test_all_budgets(function, budget):
    check_compiled(function, budget, "aot_eager")


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [0.0, 0.3])
@pytest.mark.parametrize("function", [attention_twice, layer_norm])
def test_inductor(function, budget):
    check_compiled(function, budget, "inductor")
