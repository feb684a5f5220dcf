"""torch.compile, CUDA graphs and deterministic algorithms on the default backends of a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from devices import COMPILER, DEVICE, DTYPES
from gpu_models import BATCH, HEADS, IGNORED, LENGTH, encoder, x
from helpers import deterministic, short
from judging import require

import fused_attn as fa
from fused_attn import masks
from fused_attn.tools import contract

MASKS = {
    "causal": masks.causal,
    "padding": lambda: masks.padding([LENGTH, 17, 9, 0]),
    "both": lambda: masks.causal() & masks.padding([LENGTH, 17, 9, 3]),
    "dense": lambda: masks.dense(torch.rand(LENGTH, LENGTH).tril() > 0.2),
    "alibi": lambda: masks.alibi(2.0 ** -torch.arange(1.0, HEADS + 1)),
}


def leaves(dtype=torch.float32):
    shape = BATCH, HEADS, LENGTH, 32
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for _ in range(3)]


def attend(mask, *tensors):
    """Call attention on the default backend; return out and the gradients of the operands."""
    out = fa.scaled_dot_product_attention(*tensors, mask)
    return out, *torch.autograd.grad(out.double().square().sum(), tensors)


def exact(mask, tensors):
    """Return the float64 results of `attend` on the CPU."""
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors]
    with fa.use_backend("eager"):
        return attend(mask.to("cpu"), *doubles)


def require_as_exact(got, want, truth):
    """Assert that `got` is as accurate as `want`, within the limits of the backend "sdpa"."""
    results = ([t.detach().cpu() for t in tensors] for tensors in (got, truth, want))
    findings = [
        contract.judge(f"result {i}", *tensors, gradient=i > 0)
        for i, tensors in enumerate(zip(*results, strict=True))
    ]
    require(findings, "sdpa")


@pytest.mark.parametrize("name", MASKS)
def test_compiled_call(name):
    mask, tensors = MASKS[name]().to(DEVICE), leaves()

    @torch.compile(fullgraph=True, backend=COMPILER)
    def call(*tensors):
        return fa.scaled_dot_product_attention(*tensors, mask)

    out = call(*tensors)
    got = out, *torch.autograd.grad(out.square().sum(), tensors)
    require_as_exact(got, attend(mask, *tensors), exact(mask, tensors))


def test_compiled_encoder():
    model, tokens = encoder().to(DEVICE), x().detach().to(DEVICE)
    double, ignored = copy.deepcopy(model).double(), IGNORED.to(DEVICE)
    fa.swap_modules(model)

    def trained(called, model, tokens):
        out = called(tokens, src_key_padding_mask=ignored)[~ignored]
        return out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))

    compiled = torch.compile(model, fullgraph=True, backend=COMPILER)
    truth = trained(double, double, tokens.double())
    require_as_exact(trained(compiled, model, tokens), trained(model, model, tokens), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_cuda_graph(name, dtype):
    """A replayed graph computes the forward and backward of new operand values."""
    mask, tensors = MASKS[name]().to(DEVICE), leaves(dtype)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            attend(mask, *tensors)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = attend(mask, *tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    require_as_exact(captured, attend(mask, *tensors), exact(mask, tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_deterministic(name, dtype):
    mask, tensors = MASKS[name]().to(DEVICE), leaves(dtype)
    with deterministic():
        first, second = attend(mask, *tensors), attend(mask, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_patched_function_is_restored():
    tensors = leaves()
    before = F.scaled_dot_product_attention(*tensors)
    with fa.enabled():
        F.scaled_dot_product_attention(*tensors)
    assert torch.equal(F.scaled_dot_product_attention(*tensors), before)
