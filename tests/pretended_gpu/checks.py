"""Tests of the simulated GPU, which tests/repo/test_pretended_gpu.py runs with pytest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from launches import launches
from torch import Tensor

from fused_attn import available_backends, masks, scaled_dot_product_attention
from fused_attn.backends import get_backend

# Part of the names of the kernels that only this backend launches. torch's SDPA prefers cuDNN here.
KERNELS = {
    "cuda": "attention_fwd_kernel",
    "triton": "fwd",
    "sdpa": "cudnnBackendExecute",
    "flex": "flex",
}
CUDA_ERROR_INVALID_VALUE = 1


def inputs() -> list[Tensor]:
    tensors = torch.randn(3, 1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    return [tensor.requires_grad_() for tensor in tensors]


def train(backend: str, tensors: list[Tensor]) -> None:
    out = scaled_dot_product_attention(*tensors, is_causal=True, backend=backend)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def skip_unless_available(backend: str) -> None:
    if backend not in available_backends():
        pytest.skip(f"reason: {backend} is not available here")


@pytest.mark.parametrize("backend", KERNELS)
def test_launches(backend: str) -> None:
    """Forward and backward launch kernels of the backend."""
    skip_unless_available(backend)
    before, of_backend = launches(), launches(KERNELS[backend])
    train(backend, inputs())
    assert launches() > before
    assert launches(KERNELS[backend]) > of_backend


@pytest.mark.parametrize("backend", ["cuda", "triton", "sdpa"])
def test_capture(backend: str) -> None:
    """Forward and backward do not synchronize, so a CUDA graph can capture them."""
    skip_unless_available(backend)
    tensors = inputs()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(backend, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = launches(KERNELS[backend])
    with torch.cuda.graph(graph):
        train(backend, tensors)
    assert launches(KERNELS[backend]) > before
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        Tensor.item,
        Tensor.cpu,
        Tensor.nonzero,
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.tensor([1.0], device="cuda"),
    ],
    ids=["item", "cpu", "nonzero", "stream", "device", "upload"],
)
def test_waiting_in_a_capture(wait: Callable[[Tensor], object]) -> None:
    """Synchronizing during a capture is an error, and the next capture succeeds."""
    scalar = torch.zeros((), device="cuda")

    def capture(inside: Callable[[Tensor], object]) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scalar.add(1)
            inside(scalar)

    with pytest.raises(RuntimeError, match="captur"):
        capture(wait)
    capture(Tensor.neg)


def test_waiting_after_a_capture() -> None:
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").cpu().shape == (3,)


def launch(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared: int = 0, opt_in: int = 0
) -> int:
    """Launch a kernel through the driver, and return the error code, 0 for success."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(1), ctypes.c_void_p()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxSetCurrent(context)
    driver.cuModuleGetFunction(ctypes.byref(function), module, b"kernel")
    max_dynamic_shared_size_bytes = 8
    if opt_in and driver.cuFuncSetAttribute(function, max_dynamic_shared_size_bytes, opt_in):
        return CUDA_ERROR_INVALID_VALUE
    unsigned = [ctypes.c_uint(number) for number in (*grid, *block, shared)]
    return driver.cuLaunchKernel(function, *unsigned, None, None, None)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "opt_in"),
    [
        ((0, 1, 1), (32, 1, 1), 0, 0),
        ((1, 0, 1), (32, 1, 1), 0, 0),
        ((1 << 31, 1, 1), (32, 1, 1), 0, 0),
        ((1, 65536, 1), (32, 1, 1), 0, 0),
        ((1, 1, 65536), (32, 1, 1), 0, 0),
        ((1, 1, 1), (0, 1, 1), 0, 0),
        ((1, 1, 1), (1025, 1, 1), 0, 0),
        ((1, 1, 1), (64, 32, 1), 0, 0),
        ((1, 1, 1), (1, 1, 65), 0, 0),
        ((1, 1, 1), (32, 1, 1), (48 << 10) + 1, 0),
        ((1, 1, 1), (32, 1, 1), 0, (227 << 10) + 1),
    ],
)
def test_refused_launches(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, opt_in: int
) -> None:
    before = launches()
    assert launch(grid, block, shared, opt_in) == CUDA_ERROR_INVALID_VALUE
    assert launches() == before


def test_largest_launch() -> None:
    assert launch(((1 << 31) - 1, 65535, 65535), (16, 1, 64), 227 << 10, 227 << 10) == 0


def test_unknown_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:1")


def test_host_pointers() -> None:
    """The driver function with which Triton checks pointers rejects pageable memory."""
    pytest.importorskip("triton")
    value, host = ctypes.c_uint64(), torch.zeros(3)
    driver = ctypes.CDLL("libcuda.so.1")
    arguments = ctypes.byref(value), 3, ctypes.c_uint64(host.data_ptr())
    assert driver.cuPointerGetAttribute(*arguments) == CUDA_ERROR_INVALID_VALUE
    assert not host.is_pinned() and torch.zeros(3).pin_memory().is_pinned()


@pytest.mark.parametrize("backend", KERNELS)
def test_compiled_in_one_graph(backend: str) -> None:
    """Forward and backward of a masked call compile to one graph, even with torch 2.11."""
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = masks.causal() & masks.padding(torch.tensor([40], device="cuda"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        out = scaled_dot_product_attention(x, x, x, mask, backend=backend)
        assert isinstance(out, torch.Tensor)
        return out

    call(x).sum().backward()


def test_tensors_of_other_devices_are_refused() -> None:
    """CPU kernels refuse CUDA tensors; tests/backends/test_cuda_host.py tests the reverse."""
    with pytest.raises(ValueError, match="on one device, got one on cuda:0"):
        get_backend("cpp").tile_summary(torch.zeros(1, 1, 8, 8, device="cuda"))
