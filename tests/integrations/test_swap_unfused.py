"""swap_modules reports attention in the code of other modules; profilers and reprs show kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

import fused_attn
from fused_attn import swap_modules
from fused_attn.integrations.attention_in_code import BY_HAND, CALLS_SDPA


class Operators(nn.Module):
    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return weights @ x


class SoftmaxModule(nn.Module):
    """As vit-pytorch has it: the second product is named before the softmax."""

    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(-1)

    def forward(self, x):
        scores = torch.matmul(x, x.mT)
        return torch.matmul(self.attend(scores), x)


class Einsum(nn.Module):
    def forward(self, x):
        return self._attend(torch.einsum("bik,bjk->bij", x, x), x)

    def _attend(self, scores, x):
        scores = torch.einsum("bij->bij", scores)
        return torch.einsum("bij,bjd->bid", F.softmax(scores, dim=-1), x)


class Derived(Operators):
    pass


class Sdpa(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Pooling(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Operators(), BY_HAND),
        (SoftmaxModule(), BY_HAND),
        (Einsum(), BY_HAND),
        (Derived(), BY_HAND),
        (Sdpa(), CALLS_SDPA),
        (Pooling(), None),
        (nn.Linear(3, 3), None),
        (nn.Softmax(-1), None),
        (nn.MultiheadAttention(4, 2), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_found(module, what):
    report = swap_modules(nn.Sequential(module, nn.LayerNorm(4)))
    assert [entry.reason for entry in report.unfused] == ([] if what is None else [what])
    if what is not None:
        assert str(report).splitlines()[0] == "1 swapped, 0 left alone, 1 with other attention"
        assert what in str(report)
    assert not swap_modules(module, attention=False).unfused


def test_a_model_of_nothing_but_such_attention():
    report = swap_modules(Sdpa())
    assert not report.swapped and "(the model)" in str(report) and "enable()" in str(report)


def test_reprs_show_what_is_fused():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    report = swap_modules(model)
    assert "(0): fused_attn.nn.LayerNorm((4,)" in repr(model) and "(1): Linear(" in repr(model)
    report.restore()
    assert "fused_attn" not in repr(model)


def test_profilers_see_the_kernels():
    x = torch.randn(1, 2, 16, 8, requires_grad=True)

    def step():
        out = fused_attn.scaled_dot_product_attention(x, x, x)
        fused_attn.layer_norm(out, 8).sum().backward()

    with profile() as events:
        step()
    names = {event.key for event in events.key_averages()}
    passes = {"attention_fwd", "attention_bwd", "norm_fwd", "norm_bwd"}
    assert {f"fused_attn::cpp::{name}" for name in passes} <= names
