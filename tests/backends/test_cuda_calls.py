"""Backend "cuda": launched kernels, cached masks, alignment and CUDA graphs."""

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
from fused_attn.backends import cuda

DEVICE = device_of("cuda")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
HEADS, LENGTH, HEAD_DIM = 2, 100, 16


@pytest.fixture(autouse=True)
def _backend():
    with fused_attn.use_backend("cuda"):
        yield


def qkv(seqlen_q=LENGTH):
    sizes = (seqlen_q, LENGTH, LENGTH)
    return [torch.randn(2, HEADS, n, HEAD_DIM, dtype=torch.float16, device=DEVICE) for n in sizes]


@pytest.mark.parametrize(
    "mask",
    [
        masks.padding([LENGTH, 7]),
        masks.documents(torch.arange(LENGTH, device=DEVICE) // 35),
        masks.dense(torch.rand(2, 1, 1, LENGTH, device=DEVICE) < 0.7),
    ],
    ids=["padding", "documents", "key_mask"],
)
def test_cached_masks(mask):
    """The output does not depend on whether the values cached on a mask are reused."""
    F.scaled_dot_product_attention(*qkv(), mask)
    tensors = qkv()
    got = F.scaled_dot_product_attention(*tensors, mask)
    mask.memo.clear()
    assert torch.equal(got, F.scaled_dot_product_attention(*tensors, mask))


@pytest.mark.parametrize(
    ("seqlen_q", "kernel"), [(LENGTH, "attention_fwd_kernel"), (1, "attention_decode_kernel")]
)
def test_kernel_by_number_of_queries(seqlen_q, kernel):
    tensors = qkv(seqlen_q=seqlen_q)
    launches = cuda.module.compiled().launches_of(lambda: F.scaled_dot_product_attention(*tensors))
    assert kernel in {name for name, *_ in launches}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the report uses CPU tensors")
def test_report_of_launches(monkeypatch):
    """Without a GPU, the report of `make cuda-report` lists attention and norm kernels."""
    pytest.importorskip("triton", reason="reason: the report needs triton")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import cuda_report

    monkeypatch.setattr(cuda_report, "HEAD_DIMS", (64,))
    monkeypatch.setattr(cuda_report, "COLUMNS", (768,))
    kernels = {name for name, _, _ in cuda_report.launches()}
    assert {"attention_fwd_kernel", "attention_decode_kernel"} <= kernels
    assert any("norm" in kernel for kernel in kernels)


def test_misaligned_queries():
    """The output does not depend on whether the query is aligned to 16 bytes."""
    query, key, value = qkv()
    want = F.scaled_dot_product_attention(query, key, value)
    moved = torch.empty(query.numel() + 1, dtype=query.dtype, device=DEVICE)[1:].view_as(query)
    moved.copy_(query)
    assert moved.data_ptr() % 16
    assert torch.equal(F.scaled_dot_product_attention(moved, key, value), want)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_graphs_read_the_current_mask():
    """A replayed CUDA graph uses the current values of a mask, not those of the capture."""
    tensors, values = qkv(), torch.rand(2, 1, HEADS, LENGTH, LENGTH, device=DEVICE) < 0.1
    visible = torch.zeros_like(values[0])
    mask, graph = masks.dense(visible), torch.cuda.CUDAGraph()
    # This call caches a summary in which all tiles are masked.
    F.scaled_dot_product_attention(*tensors, mask)
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(*tensors, mask)
    for value in values:
        visible.copy_(value)
        graph.replay()
        assert torch.equal(out, F.scaled_dot_product_attention(*tensors, value))
