"""Attention that swap_modules reports as unfused, and fused modules in reprs and profilers."""

from __future__ import annotations

from types import ModuleType

import attention_by_hand
import pytest
import torch
import torch.nn.functional as F
from attention_by_hand import attend
from attention_by_hand import scaled_dot_product_attention as by_hand_sdpa
from torch import matmul as renamed_matmul
from torch import nn
from torch.nn.functional import softmax as renamed_softmax
from torch.profiler import profile

import fused_attn
from fused_attn import swap_modules
from fused_attn.integrations.attention_in_code import BY_HAND, CALLS_SDPA, EITHER


class Operators(nn.Module):
    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return weights @ x


class SoftmaxModule(nn.Module):
    """Attention as in vit-pytorch: the second product precedes the softmax in the source text."""

    attend = nn.Softmax(-1)

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


class Loss(nn.Module):
    def forward(self, x):
        return F.log_softmax(x @ x.mT, -1) @ x


class Either(nn.Module):
    """Attention as in nanoGPT: calls torch's function, or is hand-written if `flash` is False."""

    flash = True

    def forward(self, x):
        if self.flash:
            return F.scaled_dot_product_attention(x, x, x)
        return torch.softmax(x @ x.mT, -1) @ x


class Extended(Operators):
    def forward(self, x):
        return super().forward(x) + 1


class Unused(nn.Linear):
    """Module whose `forward` does not call its attention."""

    def attend(self, x):
        weights = (x @ x.mT).softmax(-1)
        return weights @ x


class Processor:
    def __call__(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Processed(nn.Module):
    """Attention as in diffusers: a processor calls torch's function."""

    processor = Processor()

    def forward(self, x):
        return self.processor(x)


class Fused(nn.Module):
    def forward(self, x):
        return fused_attn.scaled_dot_product_attention(x, x, x)


class Methods(nn.Module):
    def forward(self, x):
        return self.weights(x) @ x

    def weights(self, x):
        return nn.Softmax(-1)(x @ x.mT)


# `forward` methods with hand-written attention of y to itself.
WRITTEN = {
    "one expression": lambda self, y: torch.softmax(y @ y.mT, -1) @ y,
    "functional": lambda self, y: F.softmax(y @ y.mT, dim=-1) @ y,
    "method": lambda self, y: (y @ y.mT).softmax(-1).matmul(y),
    "renamed": lambda self, y: renamed_matmul(renamed_softmax(renamed_matmul(y, y.mT), -1), y),
    "bmm": lambda self, y: torch.bmm(torch.softmax(torch.bmm(y, y.mT), -1), y),
    "einsum": lambda self, y: torch.einsum(
        "bij,bjd->bid", torch.softmax(torch.einsum("bid,bjd->bij", y, y), -1), y
    ),
    "baddbmm": lambda self, y: torch.softmax(torch.baddbmm(y @ y.mT, y, y.mT, beta=0), -1) @ y,
    "mask, scale, dropout": lambda self, y: (
        F.dropout(torch.softmax((y @ y.mT / 2).masked_fill(y @ y.mT > 1, -1e9), -1), 0.1) @ y
    ),
    "nested function": lambda self, y: [torch.softmax(z @ z.mT, -1) @ z for z in y],
    "helper": lambda self, y: attend(y, y, y),
    "helper in a module": lambda self, y: attention_by_hand.attend(y, y, y),
    "helper with torch's name": lambda self, y: by_hand_sdpa(y, y, y),
}


def reasons(module, **options):
    return [entry.reason for entry in swap_modules(module, **options).unfused]


@pytest.mark.parametrize("forward", WRITTEN.values(), ids=WRITTEN)
def test_forms_of_hand_written_attention(forward):
    assert reasons(type("Written", (nn.Module,), {"forward": forward})()) == [BY_HAND]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Operators(), BY_HAND),
        (SoftmaxModule(), BY_HAND),
        (Einsum(), BY_HAND),
        (Derived(), BY_HAND),
        (Methods(), BY_HAND),
        (Extended(), BY_HAND),
        (Sdpa(), CALLS_SDPA),
        (Processed(), CALLS_SDPA),
        (Either(), EITHER),
        (Pooling(), None),
        (Loss(), None),
        (Unused(3, 3), None),
        (Fused(), None),
        (nn.Linear(3, 3), None),
        (nn.Softmax(-1), None),
        (nn.MultiheadAttention(4, 2), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_reasons(module, reason):
    report = swap_modules(nn.Sequential(module, nn.LayerNorm(4)))
    assert [entry.reason for entry in report.unfused] == ([] if reason is None else [reason])
    if reason is not None:
        assert str(report).splitlines()[0] == "1 swapped, 0 left alone, 1 with other attention"
        assert reason in str(report)
    assert not reasons(module, attention=False)


def _refuse(name):
    raise ImportError(name)


lazy = ModuleType("lazy")
lazy.__getattr__ = _refuse


class Lazy(nn.Module):
    def forward(self, x):
        return lazy.attend(x) if lazy else Lazy.by_hand(x)

    @staticmethod
    def by_hand(x):
        return torch.Tensor.softmax(x @ x.mT, -1) @ x


def test_nothing_is_imported():
    assert reasons(Lazy()) == [BY_HAND]


@pytest.mark.parametrize("wrap", [torch.jit.script, torch.fx.symbolic_trace, torch.compile])
def test_modules_without_readable_code(wrap):
    assert not reasons(wrap(Pooling()))


def test_forward_of_an_instance_overrides_its_class():
    module = nn.Identity()
    module.forward = Operators().forward
    assert reasons(module) == [BY_HAND]


def test_model_that_is_itself_unfused_attention():
    report = swap_modules(Sdpa())
    assert not report.swapped and "(the model)" in str(report) and "enable()" in str(report)


def test_reprs_show_what_is_fused():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    report = swap_modules(model)
    assert "(0): fused_attn.nn.LayerNorm((4,)" in repr(model) and "(1): Linear(" in repr(model)
    report.restore()
    assert "fused_attn" not in repr(model)


def test_profilers_list_the_kernels():
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    with profile() as events:
        out = fused_attn.scaled_dot_product_attention(x, x, x)
        fused_attn.layer_norm(out, 8).sum().backward()
    names = {event.key for event in events.key_averages()}
    passes = {"attention_fwd", "attention_bwd", "norm_fwd", "norm_bwd"}
    assert {f"fused_attn::cpp::{name}" for name in passes} <= names
