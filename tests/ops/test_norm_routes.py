"""Norms of plain tensors skip validation; all dispatch paths give bitwise identical results."""

from __future__ import annotations

import pytest
import routes
import torch
from helpers import DTYPES, short
from norm_cases import LAYOUTS
from routes import ROUTES, checked_first

from fused_attn import functional as F

COLUMNS = 40
FORMS = {
    "plain": {},
    "residual": {"residual": True},
    "dropout": {"dropout_p": 0.25},
    "both": {"residual": True, "dropout_p": 0.25},
}


looked_at = routes.looked_at


def tensors(
    dtype=torch.float32, kind="layer_norm", shape=(3, 7, COLUMNS), residual=False, parameters=None
):
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    statistics = statistics if parameters is None else parameters
    made = {"input": torch.randn(shape, dtype=dtype)}
    if residual:
        made["residual"] = torch.randn(shape, dtype=dtype)
    made["weight"] = torch.rand(shape[-1], dtype=statistics)
    if kind == "layer_norm":
        made["bias"] = torch.randn(shape[-1], dtype=statistics)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def norm(kind, input, **options):
    torch.manual_seed(7)
    return getattr(F, kind)(input, input.shape[-1], **options)


def trained(kind, leaves, **options):
    """Return results without and with grad, and gradients for random output gradients."""
    with torch.no_grad():
        inferred = norm(kind, **leaves, **options)
    inferred = inferred if isinstance(inferred, tuple) else (inferred,)
    results = norm(kind, **leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(8)
    grads = [torch.randn_like(r) for r in results]
    return *inferred, *results, *torch.autograd.grad(results, list(leaves.values()), grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("return_residual", [False, True])
def test_every_route_gives_the_same_bits(return_residual, form, kind, dtype, looked_at):
    options = {"return_residual": return_residual, **FORMS[form]}
    leaves = tensors(dtype, kind, residual=options.pop("residual", False))
    ours = trained(kind, leaves, **options)
    assert not looked_at
    for route in ROUTES.values():
        with route():
            other = trained(kind, leaves, **options, backend="cpp")
        for ours_i, other_i in zip(ours, other, strict=True):
            assert torch.equal(ours_i, other_i)
            assert ours_i.dtype == other_i.dtype and ours_i.stride() == other_i.stride()


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
        whole = trained(kind, leaves)
    for ours_i, whole_i in zip(ours, whole, strict=True):
        assert ours_i.dtype == whole_i.dtype
        torch.testing.assert_close(ours_i, whole_i, rtol=0, atol=0, equal_nan=True)


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
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


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
    expected = torch.autograd.grad(whole.square().sum(), wanted)
    for results in zip(first, again, expected, strict=True):
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=short)
def test_saved_tensors_of_other_types(dtype, which, looked_at):
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
    """Results can be changed in place before the backward, which does not read them."""
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
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_calls_that_are_validated(looked_at):
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
