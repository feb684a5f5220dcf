"""The fused CPU pass that computes dropout(activation(x + bias)) in feed-forward blocks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, dropout_seed, short

import fused_attn
from fused_attn import nn
from fused_attn.backends.base import ACTIVATIONS
from fused_attn.base import philox
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.nn import activation as activation_module
from fused_attn.nn.activation import feed_forward_hidden
from fused_attn.ops.activation import activation_pass
from fused_attn.swap import swap_modules

SHAPES = [(3, 70), (5, 2, 33), (64, 2048), (7,), (2000, 1)]


def activated(x, activation):
    """Return the activation of x, from formulas without cancellation at large negative x."""
    if activation == "gelu":
        return x * 0.5 * torch.erfc(-x * math.sqrt(0.5))
    if activation == "gelu_tanh":
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return x.relu() if activation == "relu" else x


@pytest.fixture
def any_size(monkeypatch):
    """Make the fused pass run for tensors of any size."""
    monkeypatch.setattr(activation_module, "MIN_NUMEL", 0)


def numbers(shape, dtype):
    """Return random numbers of magnitude 0.01, 1 and 6, which cover GELU's curve and limits."""
    return torch.randn(shape, dtype=dtype) * torch.tensor([0.01, 1.0, 6.0])[torch.randint(3, shape)]


def dropped(x, dropout_p):
    return activation_pass(x, None, "identity", dropout_p)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, activation, dropout_p, dtype, isa):
    x = numbers(shape, torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(shape[-1]).to(dtype).requires_grad_() if len(shape) > 1 else None
    grad = torch.randn(shape).to(dtype)
    leaves = [t for t in (x, bias) if t is not None]
    with dropout_seed(5):
        seed = philox.new_seed(x.device)
    with dropout_seed(5):
        out = activation_pass(x, bias, activation, dropout_p)
    got = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    recorded = torch.autograd.grad(out, leaves, grad, create_graph=True)
    # The kernel rounds x + bias to the dtype of the computation.
    wide = statistics_dtype(dtype)
    total = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    keep = philox.norm_keep(seed, dropout_p, x.shape[:-1].numel(), x.shape[-1]).view(x.shape)
    want = activated(total.double(), activation)
    want = torch.where(keep, want * philox.dropout_scale(dropout_p), 0)
    want_grads = torch.autograd.grad(want, leaves, grad.double())
    # The error limit is one rounding of the result and a few of the computation. The rounding of
    # exp's argument adds `moved` more.
    size = total.double().abs()
    cubic = 1.6 * size + 0.072 * size**3
    moved = 4 * (size**2 / 2 if activation == "gelu" else cubic if "tanh" in activation else 0)
    ulps = torch.finfo(dtype).eps + (6 + moved) * torch.finfo(wide).eps
    # Subnormal results of exp are flushed to 0.
    tiny = max(64 * torch.finfo(wide).smallest_normal, torch.finfo(dtype).smallest_normal / 1024)
    assert ((out.double() - want).abs() <= ulps * want.abs() + tiny).all()
    # The slope of GELU is a sum that cancels near x = -0.75.
    absolute = 4 * torch.finfo(wide).eps * float(grad.abs().max()) + tiny
    errors = (got[0].double() - want_grads[0].double()).abs()
    assert (errors <= 2 * ulps * want_grads[0].double().abs() + absolute).all()
    torch.testing.assert_close(recorded[0].to(dtype), got[0], rtol=0.05, atol=0.05)
    if bias is not None:
        scale = grad.double().abs().reshape(-1, shape[-1]).sum(0).max().item()
        error = (got[1].double() - want_grads[1].double()).abs().max().item()
        assert error <= scale * (4 * torch.finfo(dtype).eps + 40 * torch.finfo(wide).eps)


@pytest.mark.sampled("the runs with dropout cover the activations", dropout_p=[0.0])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_order(activation, dropout_p):
    x, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 9), (9,)))

    def of(x, bias):
        torch.manual_seed(3)
        return activation_pass(x, bias, activation, dropout_p)

    assert torch.autograd.gradcheck(of, (x, bias))
    assert torch.autograd.gradgradcheck(of, (x, bias))
    jacobian = torch.autograd.functional.jacobian(of, (x, bias), vectorize=True)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(of, (x, bias)))


@pytest.mark.parametrize("activation", ["identity", "relu"])
def test_nan_and_infinity(activation):
    """Values and gradients that are not dropped are scaled, even NaN and infinities."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e38] * 200)[None]
    x.requires_grad_()
    out = activation_pass(x, None, activation, 0.25)
    kept = out != 0
    want = activated(x, activation) * philox.dropout_scale(0.25)
    torch.testing.assert_close(out[kept], want[kept], equal_nan=True)
    out.backward(torch.ones_like(out))
    assert x.grad[kept].eq(philox.dropout_scale(0.25)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_of_nan_and_infinity(activation, dtype, isa):
    """The derivative of GELU is 1 at infinity and 0 at -infinity, where torch returns NaN."""
    big, inf, nan = torch.finfo(dtype).max, float("inf"), float("nan")
    x = torch.tensor([nan, inf, -inf, 0.0, big, -big] * 7, dtype=dtype, requires_grad=True)
    out = activation_pass(x, None, activation)
    out.sum().backward()
    # GELU(-infinity) is NaN, as in torch.
    values = torch.tensor([nan, inf, nan, 0, big, 0] * 7, dtype=dtype)
    torch.testing.assert_close(out, values, equal_nan=True)
    slopes = torch.tensor([nan, 1, 0, 0.5, 1, 0] * 7, dtype=dtype)
    torch.testing.assert_close(x.grad, slopes, equal_nan=True)


def test_dropout_rate_and_seed():
    x = torch.ones(1000, 512)
    torch.manual_seed(1)
    first, second = dropped(x, 0.1), dropped(x, 0.1)
    assert not torch.equal(first, second)
    assert abs((first == 0).double().mean() - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
    torch.manual_seed(1)
    assert torch.equal(dropped(x, 0.1), first)


@pytest.mark.parametrize("activation", ["identity", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_eager_reference(dtype, activation):
    """The fused pass is bitwise identical to the eager reference, forward and backward."""
    x = torch.randn(37, 50, dtype=dtype, requires_grad=True)
    results = []
    for backend in ("cpp", "eager"):
        torch.manual_seed(4)
        with fused_attn.use_backend(backend):
            out = activation_pass(x, None, activation, 0.3)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_unsupported_calls_run_on_torch():
    x = torch.randn(4, 6)
    assert dropped(x, 1.0) is None
    for tensor in (
        x.t(), torch._neg_view(x), torch.ones(3, dtype=torch.int64), torch.randn(0, 6),
        torch.randn(3, device="meta"), torch.randn(()),
    ):  # fmt: skip
        assert dropped(tensor, 0.5) is None
    torch.vmap(lambda t: torch.ones(()) if dropped(t, 0.5) is None else None)(x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_can_be_changed_in_place(activation):
    """The result can be modified in place before the backward; with ReLU, this is an error."""
    x = torch.randn(4, 3, 6, requires_grad=True)
    out = activation_pass(x, None, activation, 0.25)
    out.mul_(2.0)
    if activation == "relu":
        with pytest.raises(RuntimeError, match="inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=short)
def test_saved_tensors_of_another_dtype(dtype, activation):
    """The backward accepts saved tensors that hooks return in another dtype."""
    x, grad = torch.randn(40, 33), torch.randn(40, 33)

    def run(unpack):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = activation_pass(leaf, None, activation)
        return torch.autograd.grad(out, leaf, grad)[0]

    torch.testing.assert_close(run(lambda t: t.to(dtype)), run(lambda t: t), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
def test_global_backward_hooks_are_called(kind):
    register = getattr(torch.nn.modules.module, f"register_module_full_{kind}_hook")
    seen = []
    handle = register(lambda module, *_: seen.append(type(module).__name__))
    try:
        layer = nn.TransformerEncoderLayer(64, 2, 256, 0.3, batch_first=True)
        layer(torch.randn(2, 40, 64, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert seen.count("Dropout") == 3


def test_small_tensors_run_on_torch():
    linear, dropout = torch.nn.Linear(8, 16), torch.nn.Dropout(0.5)
    with torch.profiler.profile() as profile:
        feed_forward_hidden(linear, F.gelu, dropout, torch.randn(5, 8))
    assert "aten::gelu" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("hooked", range(3), ids=["linear", "activation", "dropout"])
def test_hooks_are_called(hooked, any_size):
    modules = torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Dropout(0.5)
    seen, x = [], torch.randn(50, 40)
    modules[hooked].register_forward_hook(lambda *_: seen.append(hooked))
    out = feed_forward_hidden(*modules, x)
    assert seen == [hooked]
    want = F.linear(x, modules[0].weight, modules[0].bias).relu() * 2
    torch.testing.assert_close(out[out != 0], want[out != 0])


def test_output_of_a_custom_linear_is_not_modified(any_size):
    class Cached(torch.nn.Linear):
        def forward(self, x):
            self.seen = super().forward(x)
            return self.seen

    linear, x = Cached(8, 16), torch.randn(3, 8)
    with torch.no_grad():
        out = feed_forward_hidden(linear, F.gelu, None, x)
    torch.testing.assert_close(linear.seen, F.linear(x, linear.weight, linear.bias))
    torch.testing.assert_close(out, F.gelu(linear.seen))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "activation",
    [
        F.relu, torch.relu, torch.nn.ReLU(), F.gelu, torch.nn.GELU(), torch.nn.GELU("tanh"), F.silu,
        torch.nn.SiLU(), lambda x: x * 2,
    ],
    ids=["F.relu", "relu", "ReLU", "gelu", "GELU", "GELU-tanh", "silu", "SiLU", "custom"],
)  # fmt: skip
def test_feed_forward_hidden(activation, bias, grad, any_size):
    x, dropout = torch.randn(30, 40, requires_grad=grad), torch.nn.Dropout(0.4)
    linear = torch.nn.Linear(40, 50, bias=bias)
    want = activation(linear(x))
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(feed_forward_hidden(linear, activation, None, x), want)
        out = feed_forward_hidden(linear, activation, dropout, x)
        assert 0.2 < (out == 0).double().mean() < 0.85
        torch.testing.assert_close(out[out != 0], want[out != 0] * philox.dropout_scale(0.4))
        out = feed_forward_hidden(linear, activation, dropout.eval(), x)
        torch.testing.assert_close(out, want)
    if grad:
        leaves = [x, *linear.parameters()]
        direction = torch.randn_like(out)
        got, wanted = (torch.autograd.grad(y, leaves, direction) for y in (out, want))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_autocast(dtype, any_size):
    x, linear = torch.randn(30, 40), torch.nn.Linear(40, 50)
    with torch.autocast("cpu", dtype):
        out = feed_forward_hidden(linear, F.gelu, None, x)
        want = F.gelu(linear(x))
        assert out.dtype == want.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, want, rtol=2 * eps, atol=2 * eps)
    got, wanted = (torch.autograd.grad(y.sum(), linear.bias)[0] for y in (out, want))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_fuses_dropout(norm_first, any_size):
    """Training does not run torch's dropout; activation checkpointing gives the same gradient."""
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


def test_quantized_layers():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    swap_modules(layer.requires_grad_(False))
    quantized = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear})
    x = torch.randn(2, 8, 32)
    torch.testing.assert_close(quantized(x), layer(x), rtol=0.1, atol=0.1)
