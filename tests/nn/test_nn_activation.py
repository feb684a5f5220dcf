"""dropout(activation(x)) of the feed-forward block, in one pass on CPUs."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, ISAS, runnable, short

import fused_attn
from fused_attn import nn
from fused_attn.backends import cpp
from fused_attn.core import philox
from fused_attn.core.activation import dropped, dropped_relu
from fused_attn.nn.activation import drop_activation

RELU = torch.nn.functional.relu


def in_double(x, dropout_p, relu, seed):
    """What the kernel computes, by torch's operations."""
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    keep = philox.norm_keep(seed, dropout_p, rows, columns).view(x.shape)
    value = x.double().relu() if relu else x.double()
    return torch.where(keep, value * philox.dropout_scale(dropout_p), 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", [(3, 70), (5, 2, 33), (64, 2048), (7,), (2000, 1)], ids=str)
def test_values_and_gradients(shape, relu, dtype, isa):
    if not runnable(isa):
        pytest.skip(f"reason: this CPU has no {isa}")
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, dtype=dtype)
    torch.manual_seed(5)
    seed = philox.new_seed(x.device)
    torch.manual_seed(5)
    with cpp.use_isa(isa):
        out = (dropped_relu if relu else dropped)(x, 0.3)
        (got,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (watched,) = torch.autograd.grad(out, x, grad, create_graph=True)
    want = in_double(x, 0.3, relu, seed)
    (want_grad,) = torch.autograd.grad(want, x, grad.double())
    # A product is rounded once; its factor is that of the type that is calculated in.
    options = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(out.double(), want, **options)
    torch.testing.assert_close(got, want_grad.to(dtype), **options)
    torch.testing.assert_close(watched, got, **options)


@pytest.mark.parametrize("relu", [True, False])
def test_second_order(relu):
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def of(x):
        torch.manual_seed(3)
        return (dropped_relu if relu else dropped)(x, 0.4)

    assert torch.autograd.gradcheck(of, x)
    assert torch.autograd.gradgradcheck(of, x)
    jacobian = torch.autograd.functional.jacobian(of, x, vectorize=True)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(of, x))


@pytest.mark.parametrize("relu", [True, False])
def test_nan_and_infinity(relu):
    """As torch has them, where they are kept."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e38] * 200)[None]
    x.requires_grad_()
    out = (dropped_relu if relu else dropped)(x, 0.25)
    kept = out != 0
    want = (x.relu() if relu else x) * philox.dropout_scale(0.25)
    torch.testing.assert_close(out[kept], want[kept], equal_nan=True)
    out.backward(torch.ones_like(out))
    assert x.grad[kept].eq(philox.dropout_scale(0.25)).all()


def test_rate_and_seed():
    x = torch.ones(1000, 512)
    torch.manual_seed(1)
    first, second = dropped(x, 0.1), dropped(x, 0.1)
    assert not torch.equal(first, second)
    assert abs((first == 0).double().mean() - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
    torch.manual_seed(1)
    assert torch.equal(dropped(x, 0.1), first)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_reference_is_alike(dtype, relu):
    """Bit for bit, so that a training on the reference differs by attention's rounding alone."""
    x = torch.randn(37, 50, dtype=dtype, requires_grad=True)
    results = []
    for backend in ("cpp", "eager"):
        torch.manual_seed(4)
        with fused_attn.use_backend(backend):
            out = (dropped_relu if relu else dropped)(x, 0.3)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("dropout_p", [0.0, 1.0])
def test_all_or_nothing_is_torchs(dropout_p):
    assert dropped(torch.ones(3, 4), dropout_p) is None


def test_what_is_not_plain_is_torchs():
    x = torch.randn(4, 6)
    assert dropped(x.t(), 0.5) is None
    assert dropped(torch.ones(3, dtype=torch.int64), 0.5) is None
    assert dropped(torch.randn(0, 6), 0.5) is None
    assert dropped(torch.randn(3, device="meta"), 0.5) is None
    assert dropped(torch.randn(()), 0.5) is None
    torch.vmap(lambda t: torch.ones(()) if dropped(t, 0.5) is None else None)(x)


@pytest.mark.parametrize("hooked", ["dropout", "activation"])
def test_hooks_are_called(hooked):
    modules = {"dropout": torch.nn.Dropout(0.5), "activation": torch.nn.ReLU()}
    seen = []
    modules[hooked].register_forward_hook(lambda *_: seen.append(hooked))
    out = drop_activation(modules["activation"], modules["dropout"], torch.randn(50, 40))
    assert seen == [hooked]
    assert (out >= 0).all()


@pytest.mark.parametrize(
    "activation",
    [RELU, torch.relu, torch.nn.ReLU(), torch.nn.functional.gelu],
    ids=["F.relu", "relu", "ReLU", "gelu"],
)
def test_activations(activation):
    x, dropout = torch.randn(30, 40), torch.nn.Dropout(0.4)
    out = drop_activation(activation, dropout, x)
    scale = philox.dropout_scale(0.4)
    assert 0.2 < (out == 0).double().mean() < 0.85
    torch.testing.assert_close(out[out != 0], activation(x)[out != 0] * scale)
    assert torch.equal(drop_activation(activation, dropout.eval(), x), activation(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_drops_in_one_pass(norm_first, monkeypatch):
    """Nothing of a layer in training calls torch's dropout, and what checkpoints do again is the
    same."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.3, batch_first=True, norm_first=norm_first)
    x = torch.randn(2, 5, 16, requires_grad=True)
    torch.manual_seed(2)
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    torch.manual_seed(2)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), x)[0], grad)
    with torch.profiler.profile() as profile:
        layer(x)
    assert "aten::bernoulli_" not in {event.key for event in profile.key_averages()}
