"""layer_norm and rms_norm on every backend: outputs, the sum, and all gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    ONE_16_BIT_TYPE,
    assert_like_eager,
    device_of,
    leaves_of,
    short,
)
from norm_cases import norm, tensors_of

from fused_attn import functional as F
from fused_attn import use_backend

# rows, columns: one element, odd sizes around a vector, more rows than parts of the weight sum,
# a row of 64 Ki elements.
SHAPES = [(1, 1), (3, 16), (5, 37), (130, 96), (1100, 33), (2, 65536)]


@ONE_16_BIT_TYPE
@pytest.mark.thinned(
    "test_triton_norm.py has the rest of long rows", shape=SHAPES[-1:], affine=[False]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("extras", ["none", "residual", "dropout", "both"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norm(kind, extras, affine, shape, dtype, backend):
    if shape == (1, 1) and kind == "layer_norm":
        pytest.skip("reason: one element minus its mean is 0 / 0 up to eps, and so are gradients")
    residual = extras in ("residual", "both")
    options = {"dropout_p": 0.25} if extras in ("dropout", "both") else {}
    assert_like_eager(
        norm(kind, **options), tensors_of(kind, shape, residual, affine), dtype, backend
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(1370, 768), (1370, 770), (258, 4099)], ids=str)
def test_rows_that_leave_the_caches(shape, dtype):
    """Written past them on a CPU, where rows are aligned; some of a block's are, or none."""
    tensors = tensors_of("layer_norm", shape, True, True)
    assert_like_eager(norm("layer_norm", dropout_p=0.25), tensors, dtype, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_weight_of_the_same_type(dtype, backend):
    """Weights in the type of the input; float32 ones are in test_norm."""
    leaves = leaves_of(tensors_of("layer_norm", (40, 64), True, True).values(), dtype, backend)
    out = norm("layer_norm")(backend)(*leaves)[0]
    assert out.dtype == dtype
    out.sum().backward()
    assert all(leaf.grad.dtype == dtype for leaf in leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_and_strides(backend):
    there = device_of(backend)
    x = torch.randn(3, 4, 5, 6, device=there)
    weight = torch.randn(5, 6, device=there)
    got = F.layer_norm(x, (5, 6), weight, backend=backend)
    torch.testing.assert_close(got, torch.nn.functional.layer_norm(x, (5, 6), weight))
    turned = x.transpose(0, 2)
    got = F.rms_norm(turned, 6, backend=backend)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(turned, (6,)))
    for shape in ((0, 6), (2, 0, 6)):
        leaf = torch.randn(shape, device=there, requires_grad=True)
        own = torch.ones(6, device=there, requires_grad=True)
        out = F.layer_norm(leaf, 6, own, backend=backend)
        assert out.shape == shape
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancellation(backend):
    """A large mean: the difference of two large sums would lose the variance."""
    tensors = {"input": torch.randn(8, 512, generator=torch.Generator().manual_seed(1)) + 1.0e4}
    assert_like_eager(norm("layer_norm"), tensors, torch.float32, backend)


@pytest.mark.thinned("the interpreter runs one program after the other")
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_do_not_depend_on_threads(backend):
    tensors = tensors_of("layer_norm", (300, 64), True, True)
    runs, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            leaves = leaves_of(tensors.values(), torch.float32, backend)
            torch.manual_seed(3)
            out, total = norm("layer_norm", dropout_p=0.3)(backend)(*leaves)
            (out.square().sum() + total.sum()).backward()
            runs.append([out, total, *(leaf.grad for leaf in leaves)])
        finally:
            torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_lazily_negated(backend):
    x, grad = torch.randn(2, 5, 48, device=device_of(backend)).unbind()
    grads = []
    for given in (-grad, torch._neg_view(grad)):
        own = [x.clone().requires_grad_(), x.cos().requires_grad_()]
        outs = F.layer_norm(own[0], 48, residual=own[1], return_residual=True, backend=backend)
        grads.append(torch.autograd.grad(outs, own, [given, given]))
    for eager, lazy in zip(*grads, strict=True):
        assert torch.equal(eager, lazy)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_in_the_place_of_torchs_function(kind, monkeypatch):
    """The reference, which second derivatives are of too, does not come back here."""
    monkeypatch.setattr(torch.nn.functional, kind, getattr(F, kind))
    x = torch.randn(2, 5)
    with use_backend("eager"):
        torch.testing.assert_close(getattr(F, kind)(x, 5), getattr(torch, kind)(x, (5,)))
