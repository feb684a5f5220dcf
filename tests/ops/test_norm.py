"""layer_norm and rms_norm on every backend: outputs, residual sums and all gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    ONE_16_BIT_TYPE,
    assert_like_eager,
    device_of,
    drawn,
    leaves_of,
    short,
    use_threads,
)
from norm_cases import LAYOUTS, norm, tensors_of

from fused_attn import functional as F
from fused_attn import use_backend

# (rows, columns): one element, sizes that are not multiples of a vector, more rows than partial
# weight gradients, and rows of 64 Ki elements.
SHAPES = [(1, 1), (3, 16), (5, 37), (130, 96), (1100, 33), (2, 65536)]


@pytest.mark.thinned("covered in float32", dtype=[torch.bfloat16], affine=[False])
@ONE_16_BIT_TYPE
@pytest.mark.thinned("test_triton_norm.py covers long rows", shape=SHAPES[-1:], affine=[False])
@pytest.mark.thinned("covered by none and both", extras=["residual", "dropout"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("extras", ["none", "residual", "dropout", "both"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norm(kind, extras, affine, shape, dtype, backend):
    if shape == (1, 1) and kind == "layer_norm":
        pytest.skip("reason: the layer norm of one element is 0 / 0 up to eps")
    residual = extras in ("residual", "both")
    options = {"dropout_p": 0.25} if extras in ("dropout", "both") else {}
    assert_like_eager(
        norm(kind, **options), tensors_of(kind, shape, residual, affine), dtype, backend
    )


@pytest.mark.sampled(
    "covered by float32 and bfloat16",
    dtype=[torch.float64, torch.float16],
    shape=[(1370, 768), (258, 4099)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(1370, 768), (1370, 770), (258, 4099)], ids=str)
def test_rows_that_leave_the_caches(shape, dtype):
    """Norms with outputs too large for L2 (4 MiB in float32) are within the numerics contract.

    Only the rows of the first shape are aligned to the vector width.
    """
    tensors = tensors_of("layer_norm", shape, True, True)
    assert_like_eager(norm("layer_norm", dropout_p=0.25), tensors, dtype, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_weight_of_the_same_type(dtype, backend):
    """If input and weights have one 16-bit dtype, output and gradients have this dtype too."""
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
    sliced = x[:, 1:]
    got = F.layer_norm(sliced, (5, 6), weight, residual=sliced, backend=backend)
    torch.testing.assert_close(got, torch.nn.functional.layer_norm(2 * sliced, (5, 6), weight))
    many = torch.randn(*[2] * 8, 3, 6, device=there)  # more dimensions than kernels support
    for view in (x.transpose(0, 2), many, many[:, :, 1:]):
        got = F.rms_norm(view, 6, backend=backend)
        torch.testing.assert_close(got, torch.nn.functional.rms_norm(view, (6,)))
    for shape in ((0, 6), (2, 0, 6), (4, 0, 2, 1, 6)):
        empty = torch.randn(shape, device=there, requires_grad=True)
        weight = torch.ones(6, device=there, requires_grad=True)
        out = F.layer_norm(empty, 6, weight, backend=backend)
        assert out.shape == shape
        out.sum().backward()


@ONE_16_BIT_TYPE
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("added", [False, True], ids=["plain", "dropout-residual"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, added, dtype, backend):
    """Norms of views, with views as output gradients, are within the numerics contract."""
    columns = layout.view(torch.empty(layout.whole)).shape[-1]
    if layout.whole[-1] == 1 and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("reason: torch adds the rounded gradients of all columns, which cancel")
    # In rows of equal elements, layer_norm would compute 0 / 0.
    kind = "rms_norm" if layout.whole[-1] == 1 or columns == 1 else "layer_norm"
    tensors = tensors_of(kind, layout.whole, added, False)
    tensors["weight"] = tensors_of(kind, (1, columns), False, True)["weight"]

    def function(backend):
        run = norm(kind, dropout_p=0.25 if added else 0.0)(backend)

        def on_views(input, residual=None, **parameters):
            residual = None if residual is None else layout.view(residual)
            out, total = run(layout.view(input), residual, **parameters)
            # The gradients of out and total are views, because they are slices of cat's gradient.
            return (
                torch.cat([torch.zeros_like(out), out], -1),
                torch.cat([torch.zeros_like(total), total], 1),
            )

        return on_views

    assert_like_eager(function, tensors, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_copy_is_made(layout, needs_grad, backend):
    there = device_of(backend)
    views = [layout.view(torch.randn(layout.whole, device=there)) for _ in range(3)]
    if views[0].numel() == 0:
        pytest.skip("reason: empty views need no copy")

    def copies(tensors):
        x, residual, grad = (t.detach() for t in tensors)
        x.requires_grad_(needs_grad)
        with torch.profiler.profile() as profile:
            out = F.layer_norm(x, x.shape[-1], residual=residual, backend=backend)
            if needs_grad:
                torch.autograd.grad(out, x, grad)
        events = profile.key_averages()
        return sum(e.count for e in events if e.key in ("aten::clone", "aten::copy_"))

    # Triton's interpreter copies contiguous tensors, too.
    of_contiguous = copies([view.contiguous() for view in views])
    assert (copies(views) == of_contiguous) == layout.in_place


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_of_any_length(backend):
    """Norms of views are bitwise identical for any number of rows that are contiguous in memory."""
    for length in (*range(2, 10), 31, 32, 33, 1000, 4097):
        view = torch.randn(3, length + 1, 8, device=device_of(backend))[:, 1:]
        got = F.rms_norm(view, 8, backend=backend)
        assert torch.equal(got, F.rms_norm(view.contiguous(), 8, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_counts_logical_rows(backend):
    """The dropout mask does not depend on the memory layout."""
    for layout in LAYOUTS.values():
        view = layout.view(torch.randn(layout.whole, device=device_of(backend)))
        options = {"dropout_p": 0.5, "seed": 3, "return_residual": True, "backend": backend}
        sums = [F.rms_norm(x, x.shape[-1], **options)[1] for x in (view, view.contiguous())]
        assert torch.equal(*sums)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_that_are_compiled(backend):
    def normed(x, residual, weight):
        residual = residual.transpose(0, 1)
        return F.layer_norm(x[:, 1:], 24, weight, residual=residual, backend=backend).mT

    compiled = torch.compile(normed, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 7):
        shapes = (3, length + 1, 24), (length, 3, 24), (24,)
        leaves = [torch.randn(s, device=device_of(backend), requires_grad=True) for s in shapes]
        results = []
        for function in (compiled, normed):
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancellation(backend):
    """layer_norm is within the numerics contract if the mean is large compared to the variance."""
    tensors = {"input": torch.randn(8, 512, generator=drawn(1)) + 1.0e4}
    assert_like_eager(norm("layer_norm"), tensors, torch.float32, backend)


def test_results_do_not_depend_on_threads():
    tensors = tensors_of("layer_norm", (300, 64), True, True)
    runs = []
    for number in (1, 2, 3):
        with use_threads(number):
            leaves = leaves_of(tensors.values(), torch.float32, "cpp")
            torch.manual_seed(3)
            out, total = norm("layer_norm", dropout_p=0.3)("cpp")(*leaves)
            loss = out.square().sum() + total.sum()
            runs.append([out, total, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(runs[1:], [runs[0]] * 2, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_lazily_negated(backend):
    x, residual, grad = torch.randn(3, 5, 48, device=device_of(backend)).unbind()
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    grads = []
    for grad_out in (-grad, torch._neg_view(grad)):
        outs = F.layer_norm(x, 48, residual=residual, return_residual=True, backend=backend)
        grads.append(torch.autograd.grad(outs, leaves, [grad_out, grad_out]))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_in_the_place_of_torchs_function(kind, monkeypatch):
    """The eager backend does not recurse if torch.nn.functional's norm is patched with ours."""
    monkeypatch.setattr(torch.nn.functional, kind, getattr(F, kind))
    x = torch.randn(2, 5)
    with use_backend("eager"):
        torch.testing.assert_close(getattr(F, kind)(x, 5), getattr(torch, kind)(x, (5,)))
