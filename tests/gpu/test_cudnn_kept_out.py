"""Kernels that torch selects for calls of this package, as named by torch's profiler.

cuDNN's gradients are wrong for some calls with a mask tensor; see backends/denylist.py.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from devices import BACKENDS, COMPILER, DEVICE, ON_GPU, by_torch, named
from judging import skip_if_refused

import fused_attn as fa
from fused_attn import masks
from fused_attn.backends import denylist, sdpa

PREFIX = "aten::_scaled_dot_product_"
SIZES = 2, 4, 128, 192, 64  # seqlen_k % 128 == 64, where cuDNN's gradients can be NaN


def operands(seqlen_q=SIZES[2], dtype=torch.bfloat16):
    batch, heads, _, seqlen_k, dim = SIZES
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, n, dim, generator=generator).to(DEVICE, dtype).requires_grad_()
        for n in (seqlen_q, seqlen_k, seqlen_k)
    ]


@contextlib.contextmanager
def kernels():
    """Record the names, without PREFIX, of torch's SDPA ops that run within the block."""
    names = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    found = (e.name for e in profile.events() if e.name.startswith(PREFIX))
    names.extend(name.removeprefix(PREFIX) for name in found)


def require_no_denied_cudnn(ran, situation):
    """Assert that no cuDNN kernel ran if cuDNN is denylisted in this situation."""
    denied = denylist.is_denied("cudnn", situation, DEVICE)
    assert not (denied and any("cudnn" in kernel for kernel in ran)), ran


MASKS = {
    "bool": lambda: torch.rand(SIZES[2], SIZES[3], device=DEVICE) < 0.7,
    "float": lambda: torch.randn(SIZES[2], SIZES[3], device=DEVICE).bfloat16(),
    "learned": lambda: torch.randn(
        1, 4, SIZES[2], SIZES[3], device=DEVICE, dtype=torch.bfloat16, requires_grad=True
    ),
    "padding": lambda: masks.padding([SIZES[3], 70]).to(DEVICE),
    "alibi": lambda: masks.alibi(2.0 ** -torch.arange(1.0, 5)).to(DEVICE),
    "window": lambda: masks.sliding_window(9, 5),
}


def called(how, mask, leaves):
    """Return the output of torch's function under enabled(), or of ours on the backend `how`."""
    if how == "enabled":
        with fa.enabled():
            return F.scaled_dot_product_attention(*leaves, mask)
    return fa.scaled_dot_product_attention(*leaves, mask, backend=named(how))


@pytest.mark.parametrize("how", ["sdpa", "default", "enabled"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_with_gradients(name, how):
    """If cuDNN is denylisted for masks with gradients, its forward and backward do not run."""
    mask = MASKS[name]()
    if how == "enabled" and isinstance(mask, masks.Mask):
        pytest.skip("reason: torch's function accepts only mask tensors")
    leaves = operands()
    with kernels() as ran:
        grads = torch.autograd.grad(called(how, mask, leaves).float().square().sum(), leaves)
    if ON_GPU:
        require_no_denied_cudnn(ran, denylist.MASK_WITH_GRADIENTS)
        assert torch.backends.cuda.cudnn_sdp_enabled(), "the call did not enable cuDNN again"
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_query_with_gradients(compiled):
    leaves = operands(seqlen_q=1)

    def call(*tensors):
        return fa.scaled_dot_product_attention(*tensors, backend="sdpa")

    function = torch.compile(call, fullgraph=True) if compiled else call
    with kernels() as ran:
        torch.autograd.grad(function(*leaves).float().sum(), leaves)
    require_no_denied_cudnn(ran, denylist.ONE_QUERY_WITH_GRADIENTS)


@pytest.mark.parametrize("name", ["bool", "padding"])
def test_compiled_masks_with_gradients(name):
    mask, leaves = MASKS[name](), operands()

    @torch.compile(fullgraph=True, backend=COMPILER)
    def call(*tensors):
        return fa.scaled_dot_product_attention(*tensors, mask, backend="sdpa")

    with kernels() as ran:
        grads = torch.autograd.grad(call(*leaves).float().square().sum(), leaves)
    if ON_GPU:
        require_no_denied_cudnn(ran, denylist.MASK_WITH_GRADIENTS)
    assert all(grad.isfinite().all() for grad in grads)


# ---- masks without a tensor ---------------------------------------------------------------------

CAUSAL = {
    "is_causal": lambda: (None, True),
    "masks.causal": lambda: (masks.causal(), False),
    "both": lambda: (masks.causal(), True),
    "none": lambda: (None, False),
}


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if by_torch(b)])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_needs_no_mask_tensor(name, backend, gradients, monkeypatch):
    """For unmasked and causal calls, torch's SDPA receives no mask and runs a fused kernel."""
    mask, is_causal = CAUSAL[name]()
    received, attend = [], sdpa.torch_sdpa

    def recording(query, key, value, mask, dropout_p, is_causal, **options):
        received.append((mask, is_causal))
        return attend(query, key, value, mask, dropout_p, is_causal, **options)

    monkeypatch.setattr(sdpa, "torch_sdpa", recording)
    leaves = [t.detach().requires_grad_(gradients) for t in operands(seqlen_q=SIZES[3])]
    with skip_if_refused(), kernels() as ran:
        options = {"is_causal": is_causal, "backend": named(backend)}
        fa.scaled_dot_product_attention(*leaves, mask, **options)
    assert received == [(None, name != "none")]
    fused = "flash", "efficient", "cudnn"
    assert any(kernel.startswith(fused) for kernel in ran), f"not fused: {ran}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["is_causal", "masks.causal"])
def test_memory_of_causal_calls(name):
    """Causal calls use less than a quarter of the memory of a (seqlen, seqlen) bool mask."""
    mask, is_causal = CAUSAL[name]()
    length = 16384
    tensors = torch.randn(3, 1, 1, length, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    leaves = [t.detach().requires_grad_() for t in tensors]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fa.scaled_dot_product_attention(*leaves, mask, is_causal=is_causal).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < length * length / 4, f"{used / 2**20:.0f} MiB"
