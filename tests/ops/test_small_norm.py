"""Small layer norms run on torch's kernels, which are faster at these sizes."""

import pytest
import torch

import fused_attn
from fused_attn import functional as F
from fused_attn.base import small_calls

pytestmark = pytest.mark.small_calls


def own_node(out):
    """Return True if a kernel of this package computed the result."""
    return "_Norm" in out.grad_fn.name()


def leaves(dtype=torch.float32):
    """Return the input, weight and bias of a layer norm of 8 rows."""
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((8, 64), (64,), (64,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_training_is_torchs(dtype):
    """Small norms and their gradients are bitwise equal to torch's."""
    x, weight, bias = leaves(dtype)
    out = F.layer_norm(x, 64, weight, bias)
    want = torch.nn.functional.layer_norm(x, (64,), weight, bias)
    assert torch.equal(out, want) and not own_node(out)
    grads = [torch.autograd.grad(t.sum(), (x, weight, bias)) for t in (out, want)]
    assert all(map(torch.equal, *grads))
    out, total = F.layer_norm(x, 64, weight, bias, return_residual=True)
    assert total is x and torch.equal(out, want)
    out, total = F.layer_norm(x, 64, weight, bias, residual=x, return_residual=True)
    assert torch.equal(total, x + x) and not own_node(out)
    assert torch.equal(out, torch.nn.functional.layer_norm(x + x, (64,), weight, bias))


def test_the_kernels_have_the_rest(monkeypatch):
    """Norms that are large, that torch does not support or that name a backend run on a kernel."""
    x, weight, bias = leaves()
    assert own_node(F.layer_norm(x, 64, weight, bias, dropout_p=0.5))
    assert own_node(F.layer_norm(x, 64, weight, bias, backend="cpp"))
    assert own_node(F.rms_norm(x, 64, weight))
    F.layer_norm(x.bfloat16(), 64, None, bias).sum().backward()  # unsupported by torch
    assert torch.equal(bias.grad, torch.full((64,), 8.0))
    with fused_attn.use_backend("cpp"):
        assert own_node(F.layer_norm(x, 64, weight, bias))
    limits = small_calls.limits._replace(norm_training=x.numel() - 1)
    monkeypatch.setattr(small_calls, "limits", limits)
    assert own_node(F.layer_norm(x, 64, weight, bias))
    assert own_node(F.layer_norm(x, 64, weight, bias, residual=x))


def test_non_contiguous_rows(monkeypatch):
    """Norms of non-contiguous rows equal torch's, below and above the limit of small calls."""
    x = torch.randn(2, 64, 5, 6, requires_grad=True)
    want = torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), (64,))
    grad_out = torch.randn_like(want)
    grad = torch.autograd.grad(want, x, grad_out)[0]
    for limit in (1 << 17, -1):
        limits = small_calls.limits._replace(norm_training=limit)
        monkeypatch.setattr(small_calls, "limits", limits)
        out = F.layer_norm(x.permute(0, 2, 3, 1), 64)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out, x, grad_out)[0], grad)
        with torch.no_grad():
            torch.testing.assert_close(F.layer_norm(x.permute(0, 2, 3, 1), 64), want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: F.layer_norm(x, 63), ValueError, "input must have a shape that ends with"),
        (lambda x: F.layer_norm(x, ()), ValueError, "at least one dimension"),
        (lambda x: F.layer_norm(x, 64, x[0, :5]), ValueError, "weight must have shape"),
        (lambda x: F.layer_norm(x, 64, "w"), TypeError, "weight must be a tensor, got str"),
        (lambda x: F.layer_norm(x, 64, eps="e"), TypeError, "eps must be a float, got str"),
        (lambda x: F.layer_norm(x.long(), 64), TypeError, "input must be float32"),
    ],
)
def test_messages_are_ours(call, error, message):
    """Invalid small norms raise the error messages of this package, not those of torch."""
    for x in leaves()[0], torch.randn(4, 64):
        with pytest.raises(error, match=message):
            call(x)


def test_compiled_norms_are_torchs_operations():
    """Small norms compile to torch's op, which Inductor can fuse; with dropout, our kernel runs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    x, weight, bias = leaves()

    def step(x, dropout_p):
        return F.layer_norm(x, 64, weight, bias, residual=x, dropout_p=dropout_p)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, 0.0), step(x, 0.0))
    assert "layer_norm" in graphs[0] and "fused_attn" not in graphs[0]
    compiled(x, 0.5)
    assert "_Norm" in graphs[1] or "autograd_function_apply" in graphs[1]
