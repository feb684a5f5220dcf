"""Calls of the CUDA backend, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import BACKENDS

if "cuda" not in BACKENDS:
    pytest.skip("reason: needs a GPU, or CUDA_EMULATED=1", allow_module_level=True)

from helpers import device_of

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import cuda, registry

DEVICE = device_of("cuda")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
HEADS, LENGTH, HEAD_DIM = 2, 100, 16


@pytest.fixture(autouse=True)
def _backend():
    with fused_attn.use_backend("cuda"):
        yield


def qkv(seqlen_q=LENGTH, dtype=torch.float16):
    sizes = (seqlen_q, LENGTH, LENGTH)
    return [torch.randn(2, HEADS, n, HEAD_DIM, dtype=dtype, device=DEVICE) for n in sizes]


def documents():
    return masks.documents(torch.arange(LENGTH, device=DEVICE) // 35)


def key_mask():
    return torch.rand(2, 1, 1, LENGTH, device=DEVICE) < 0.7


MASKS = {
    "none": lambda: None,
    "causal": masks.causal,
    "padding": lambda: masks.padding([LENGTH, 7]),
    "documents": lambda: MASK_OF_DOCUMENTS,
    "bool": lambda: torch.rand(2, HEADS, LENGTH, LENGTH, device=DEVICE) < 0.7,
    "float": lambda: torch.randn(1, HEADS, LENGTH, LENGTH, device=DEVICE),
    "key_mask": key_mask,
}
MASK_OF_DOCUMENTS = documents()


def kernels_of(call):
    """What a call starts."""
    return [kernel for kernel, *_ in cuda.module.compiled().launches_of(call)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"return_lse": True}], ids=str)
def test_second_call_is_the_first(name, options):
    first, second = MASKS[name](), MASKS[name]()
    if not isinstance(first, torch.Tensor):
        second = first  # what is kept is a Mask's
    tensors = qkv()
    F.scaled_dot_product_attention(*qkv(), first, **options)
    got = F.scaled_dot_product_attention(*tensors, second, **options)
    kernels = kernels_of(lambda: F.scaled_dot_product_attention(*tensors, second, **options))
    if isinstance(second, fused_attn.Mask):
        second.memo.clear()
    want = F.scaled_dot_product_attention(*tensors, second, **options)
    assert "attention_fwd_kernel" in kernels
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the report's tensors are on the CPU")
def test_report_of_launches(monkeypatch):
    """`make cuda-report` asks for what it lists without a GPU."""
    pytest.importorskip("triton", reason="reason: its table is that of Triton's tools")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import cuda_report

    monkeypatch.setattr(cuda_report, "HEAD_DIMS", (64,))
    monkeypatch.setattr(cuda_report, "COLUMNS", (768,))
    kernels = {name for name, _, _ in cuda_report.launches()}
    assert {"attention_fwd_kernel", "attention_decode_kernel"} <= kernels
    assert any("norm" in kernel for kernel in kernels)


def test_decoding():
    F.scaled_dot_product_attention(*qkv(seqlen_q=1))
    tensors = qkv(seqlen_q=1)
    got = F.scaled_dot_product_attention(*tensors)
    assert "attention_decode_kernel" in kernels_of(lambda: F.scaled_dot_product_attention(*tensors))
    assert torch.equal(got, F.scaled_dot_product_attention(*tensors))


def test_tensors_that_begin_elsewhere():
    """Of the same strides, but not where a chunk of 16 bytes begins."""
    query, key, value = qkv()
    want = F.scaled_dot_product_attention(query, key, value)
    moved = torch.empty(query.numel() + 1, dtype=query.dtype, device=DEVICE)[1:].view_as(query)
    moved.copy_(query)
    assert moved.data_ptr() % 16
    assert torch.equal(F.scaled_dot_product_attention(moved, key, value), want)


def test_what_is_not_read_in_place():
    for dim in (5, 16):
        tensors = [torch.randn(2, HEADS, LENGTH, dim, device=DEVICE) for _ in range(3)]
        tensors[0].requires_grad_()
        first = F.scaled_dot_product_attention(*tensors)
        assert torch.equal(F.scaled_dot_product_attention(*tensors), first)


def test_second_norm_is_the_first():
    weight = torch.randn(48, device=DEVICE)
    x, y = torch.randn(2, 30, 48, device=DEVICE)
    F.layer_norm(x, 48, weight)
    got = F.layer_norm(y, 48, weight)
    assert torch.equal(got, F.layer_norm(y, 48, weight))


def test_calls_are_of_a_backend(monkeypatch):
    tensors = qkv(dtype=torch.float32)
    got = F.scaled_dot_product_attention(*tensors)
    with fused_attn.use_backend("eager"):
        assert not torch.equal(F.scaled_dot_product_attention(*tensors), got)
    assert not torch.equal(F.scaled_dot_product_attention(*tensors, backend="eager"), got)
    monkeypatch.setattr(registry, "_override", None)
    assert not torch.equal(F.scaled_dot_product_attention(*tensors), got)
    assert torch.equal(F.scaled_dot_product_attention(*tensors, backend="cuda"), got)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_graphs_see_masks_as_they_are_when_replayed():
    tensors, masks_seen = qkv(), torch.rand(2, 1, HEADS, LENGTH, LENGTH, device=DEVICE) < 0.1
    seen = torch.zeros_like(masks_seen[0])
    mask, graph = masks.dense(seen), torch.cuda.CUDAGraph()
    F.scaled_dot_product_attention(*tensors, mask)  # what is kept of it says that nothing is seen
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(*tensors, mask)
    for now in masks_seen:
        seen.copy_(now)
        graph.replay()
        assert torch.equal(out, F.scaled_dot_product_attention(*tensors, now))
