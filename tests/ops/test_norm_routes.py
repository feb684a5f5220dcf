"""Dispatch paths of norms: ordinary calls skip validation, and all paths give identical bits."""

from __future__ import annotations

import pytest
import routes
import torch
from helpers import DTYPES, short
from norm_cases import LAYOUTS
from routes import ROUTES, checked_first

from fused_attn import functional as F

COLUMNS = 40
looked_at = routes.looked_at


def tensors(dtype=torch.float32, kind="layer_norm", residual=False, parameters=None):
    """Return the tensors of a norm call by name; `parameters` is the dtype of weight and bias."""
    if parameters is None:
        parameters = torch.promote_types(dtype, torch.float32)
    made = {"input": torch.randn(3, 7, COLUMNS, dtype=dtype)}
    if residual:
        made["residual"] = torch.randn(3, 7, COLUMNS, dtype=dtype)
    made["weight"] = torch.rand(COLUMNS, dtype=parameters)
    if kind == "layer_norm":
        made["bias"] = torch.randn(COLUMNS, dtype=parameters)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def norm(kind, input, **options):
    torch.manual_seed(7)
    return getattr(F, kind)(input, input.shape[-1], **options)


def trained(kind, leaves, **options):
    """Return results without and with grad, and gradients for random output gradients."""
    with torch.no_grad():
        inferred = norm(kind, **leaves, **options)
    results = norm(kind, **leaves, **options)
    if isinstance(results, torch.Tensor):
        inferred, results = (inferred,), (results,)
    torch.manual_seed(8)
    grads = [torch.randn_like(r) for r in results]
    return *inferred, *results, *torch.autograd.grad(results, list(leaves.values()), grads)


def assert_same_bits(results, equal_nan=False):
    """Assert that all lists of tensors are bitwise identical, with equal dtypes and strides."""
    for other in results[1:]:
        torch.testing.assert_close(
            other, results[0], rtol=0, atol=0, equal_nan=equal_nan, check_stride=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("return_residual", [False, True])
def test_every_route_gives_the_same_bits(
    return_residual, dropout_p, residual, kind, dtype, looked_at
):
    options = {"return_residual": return_residual, "dropout_p": dropout_p}
    leaves = tensors(dtype, kind, residual)
    results = [trained(kind, leaves, **options)]
    assert not looked_at
    for route in ROUTES.values():
        with route():
            results.append(trained(kind, leaves, **options, backend="cpp"))
    assert_same_bits(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_16_bit_parameters(kind, parameters, dtype, looked_at):
    leaves = tensors(dtype, kind, parameters=parameters)
    with torch.no_grad():
        leaves["weight"][:4] = torch.tensor([1e-6, -3e4, torch.nan, torch.inf])
    ours = trained(kind, leaves)
    assert not looked_at
    with checked_first():
        assert_same_bits([ours, trained(kind, leaves)], equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    """All routes give bitwise identical results if inputs and output gradients are views."""
    whole = torch.randn(layout.whole, requires_grad=True)
    results = []
    for route in ROUTES.values():
        with route():
            view = layout.view(whole)
            out = norm("rms_norm", view, residual=view)
            grad = layout.view(torch.linspace(-1, 1, whole.numel()).view(layout.whole))
            results.append((out, *torch.autograd.grad(out, whole, grad)))
    assert_same_bits(results)


@pytest.mark.parametrize("frozen", [("input",), ("weight", "bias"), ("input", "bias")])
def test_some_gradients_and_retained_graphs(frozen, looked_at):
    leaves = tensors()
    for name in frozen:
        leaves[name].requires_grad_(False)
    wanted = [t for t in leaves.values() if t.requires_grad]
    out = norm("layer_norm", **leaves)
    assert not looked_at
    with checked_first():
        whole = norm("layer_norm", **leaves)
    first = torch.autograd.grad(out.square().sum(), wanted, retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), wanted)
    assert_same_bits([first, again, torch.autograd.grad(whole.square().sum(), wanted)])


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=short)
def test_saved_tensors_of_other_types(dtype, which, looked_at):
    """Gradients are correct if a saved-tensor hook changes the dtype of a saved tensor."""
    leaves, unpacked = tensors(torch.bfloat16), []

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor.to(dtype) if len(unpacked) - 1 == which else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = norm("layer_norm", **leaves)
    assert not looked_at
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    assert len(unpacked) > which
    expected = torch.autograd.grad(
        norm("layer_norm", **leaves).square().sum(), list(leaves.values())
    )
    torch.testing.assert_close(grads, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("changed", ["input", "weight"])
def test_changes_before_the_backward_are_errors(changed, looked_at):
    leaves = tensors()
    own = {name: tensor * 1 for name, tensor in leaves.items()}
    out = norm("layer_norm", **own)
    assert not looked_at
    with torch.no_grad():
        own[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_may_be_changed(looked_at):
    """Results may change in place before the backward, because it does not read them."""
    leaves = tensors(residual=True)
    out, total = norm("layer_norm", **leaves, return_residual=True)
    out.add_(1.0).sum().backward()
    assert not looked_at and leaves["input"].grad is not None
    assert out._base is None and total._base is None


def test_autocast():
    leaves = tensors()
    results = []
    for route in ROUTES.values():
        with route(), torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(trained("layer_norm", leaves))
    assert_same_bits(results)


def test_calls_that_are_validated(looked_at):
    """Unusual calls are validated instead of taking the fast path."""
    x = torch.randn(3, 4, 8, requires_grad=True)
    own = torch.ones(8, dtype=torch.float64, requires_grad=True)
    calls = (
        lambda: F.layer_norm(x, (4, 8)),
        lambda: F.layer_norm(x, 8, own),
        lambda: F.layer_norm(x, 8, dropout_p=0.5, seed=3),
        lambda: F.layer_norm(x[:0], 8),
    )
    for number, call in enumerate(calls, 1):
        call().sum().backward()
        assert len(looked_at) == number
    for wrong in (9, (8, 8), (3, 8)):
        with pytest.raises(ValueError, match="normalized_shape"):
            F.layer_norm(x, wrong)
