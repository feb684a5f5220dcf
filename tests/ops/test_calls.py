"""Several calls in sequence: cached masks, pooled memory, and per-thread workspaces."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import fused_attn
from fused_attn import Mask, _cpu, masks
from fused_attn import functional as F
from fused_attn.backends import get_backend
from fused_attn.masks import memo
from fused_attn.masks.spec import spec_of_mask, with_summaries


def qkv(*shape, dtype=torch.float32):
    return [torch.randn(*shape).to(dtype) for _ in range(3)]


def call(q, k, v, mask, **options):
    """Return out, lse if it is requested, and gradients if query requires grad."""
    torch.manual_seed(0)
    result = F.scaled_dot_product_attention(q, k, v, mask, **options)
    results = list(result) if isinstance(result, tuple) else [result]
    if results[0].requires_grad:
        results += torch.autograd.grad(results[0].square().sum(), (q, k, v))
    return results


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(40, 40) > 0.3,
        lambda: (torch.rand(2, 1, 80, 40) > 0.3)[:, :, ::2],
        lambda: torch.rand(2, 1, 1, 40) > 0.3,
        lambda: (torch.rand(3, 1, 40) > 0.3).expand(3, 40, 40),
        lambda: torch.randn(3, 40, 40),
        lambda: torch.randn(40, 3, 40).transpose(0, 1),
        lambda: masks.padding([40, 13]) & masks.causal(),
        lambda: masks.bias(torch.randn(1, 3, 40, 40)) & masks.dense(torch.rand(40, 40) > 0.2),
    ],
    ids=["bool", "strided", "key", "expanded", "float", "transposed", "lengths", "bias"],
)
def test_masks_in_turn(make, options, grad):
    """A call does not reuse values cached for another mask or before an in-place change."""
    tensors = [t.requires_grad_(grad) for t in qkv(2, 3, 40, 16)]
    mask = make()
    call(*tensors, mask, **options)
    own = isinstance(mask, Mask)
    for change in (False, True):
        if change:  # in place
            changed = mask.tensors()[0] if own else mask
            changed = changed if changed._base is None else changed._base
            changed.copy_(changed.flip(-1))
        elif not own:
            mask = make()
        fresh = mask.mapped(torch.clone) if own else mask.clone()
        assert fresh is not mask
        got = call(*tensors, mask, **options)
        for a, b in zip(got, call(*tensors, fresh, **options), strict=True):
            assert torch.equal(a, b)


def test_bias_that_requires_grad_later():
    """A bias that was cached as a constant has a gradient once requires_grad is set."""
    q, k, v = qkv(2, 3, 40, 16)
    bias = torch.randn(3, 40, 40, requires_grad=True)
    mask = masks.bias(torch.randn(3, 40, 40))
    for _ in range(2):
        F.scaled_dot_product_attention(q, k, v, bias).sum().backward()
        F.scaled_dot_product_attention(q, k, v, mask)
    assert bias.grad is not None
    mask.tensors()[0].requires_grad_()
    F.scaled_dot_product_attention(q, k, v, mask).sum().backward()
    assert mask.tensors()[0].grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_calls_do_not_keep_masks_alive(grad):
    q, k, v = (t.requires_grad_(grad) for t in qkv(1, 2, 16, 8))
    mask = torch.zeros(1, 2, 16, 16)
    alive = weakref.ref(mask.untyped_storage())
    for _ in range(2):
        F.scaled_dot_product_attention(q, k, v, mask)
    mask = None
    gc.collect()
    assert alive() is None


def test_options_that_may_change():
    q, k, v = qkv(1, 2, 16, 8)
    causal = torch.tensor(True)
    first = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    causal.fill_(False)
    assert not torch.equal(first, F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    eps = torch.tensor(1e-5)
    first = F.layer_norm(q, 8, eps=eps)
    eps.fill_(10.0)
    assert not torch.equal(first, F.layer_norm(q, 8, eps=eps))


def test_pooled_outputs_are_their_own():
    """Large outputs come from a memory pool, but live outputs never share memory."""
    q, k, v = qkv(2, 8, 512, 64)
    kept = [F.scaled_dot_product_attention(q, k, v + i) for i in range(4)]
    again = [F.scaled_dot_product_attention(q, k, v + i) for i in range(4)]
    for a, b in zip(kept, again, strict=True):
        assert a.data_ptr() != b.data_ptr()
        assert torch.equal(a, b)
    del kept, a
    view = again[0].transpose(1, 2).reshape(2, 512, 512)[0]
    want = view.clone()
    del again, b
    for i in range(4):
        F.scaled_dot_product_attention(q, k, v - i)
    assert torch.equal(view, want)  # the memory of a live view is not reused


def test_pool_gives_the_same_memory_again():
    def new():
        return _cpu.empty_tensor((1000, 1000), (1000, 1), 0)

    _cpu.release_workspace()
    first = new()
    address = first.data_ptr()
    assert new().data_ptr() != address
    _cpu.release_workspace()
    del first
    assert new().data_ptr() == address


@pytest.mark.parametrize("dtype", [-2, 4])
def test_memory_of_unknown_dtypes_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype"):
        _cpu.empty_tensor((2,), (1,), dtype)


def test_small_blocks_keep_no_large_one_out_of_the_pool():
    def new(rows):
        return _cpu.empty_tensor((rows, 1000), (1000, 1), 0)

    _cpu.release_workspace()
    small = [new(100) for _ in range(100)]
    large = new(1000)
    address = large.data_ptr()
    del small
    del large
    another = torch.empty(1000, 1000)  # would get this block if the pool had freed it
    assert new(1000).data_ptr() == address != another.data_ptr()


def test_pooled_outputs_take_part_in_autograd():
    x = torch.randn(1024, 512, requires_grad=True)
    w, b = torch.ones(512, requires_grad=True), torch.zeros(512, requires_grad=True)
    out = F.layer_norm(x, 512, w, b)
    out.mul_(2.0)  # out is not a view, so it can be changed in place
    out.sum().backward()
    assert torch.allclose(b.grad, torch.full((512,), 2048.0))


def test_threads_do_not_share_workspace():
    problems = [qkv(1, 4, 200 + 30 * i, 64) for i in range(6)]
    wants = [F.scaled_dot_product_attention(*x) for x in problems]
    failures = []

    def work(i):
        results = (F.scaled_dot_product_attention(*problems[i]) for _ in range(20))
        failures.extend(i for got in results if not torch.equal(got, wants[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_cuda_graph_capture_bypasses_the_mask_cache(monkeypatch):
    """CUDA graph capture bypasses the mask cache, because masks may change before a replay."""
    x, mask = qkv(1, 2, 40, 16), masks.dense(torch.rand(40, 40) < 0.5)

    def kept():
        F.scaled_dot_product_attention(*x, mask)
        return [entry.value for entry in mask.memo.values()]

    before = kept()
    assert before
    monkeypatch.setattr(memo, "captured", lambda *tensors: bool(tensors))
    assert kept() == before
    mask.memo.clear()
    F.scaled_dot_product_attention(*x, mask)
    assert not mask.memo


def test_a_captured_graph_keeps_the_cached_values_that_it_reads(monkeypatch):
    """Masks that the host describes are on the GPU when a capture begins; replays read them."""
    monkeypatch.setattr(memo, "stream_of", lambda device: 1)
    monkeypatch.setattr(memo, "_of_graphs", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cached, device = {}, torch.device("cuda")

    def recalled():
        return memo.recall(cached, "key", [], device, lambda: torch.ones(3))

    first = weakref.ref(recalled())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert recalled() is first()
    cached.clear()
    assert first() is not None


def test_a_value_computed_in_a_captured_graph_is_not_cached(monkeypatch):
    """All captures use one stream by default. Another graph may be replayed first."""
    monkeypatch.setattr(memo, "stream_of", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cached, device = {}, torch.device("cuda")
    first, second = (
        memo.recall(cached, "key", [], device, lambda: torch.ones(3)) for _ in range(2)
    )
    assert first is not second and not cached


def test_norms_do_not_depend_on_return_residual():
    """The norm of a sum is bitwise identical with and without return_residual and gradients."""
    x, residual = (torch.randn(64, 128).bfloat16() for _ in "xr")
    weight = torch.ones(128)
    alone = F.rms_norm(x, 128, weight, residual=residual)
    together, _ = F.rms_norm(x, 128, weight, residual=residual, return_residual=True)
    leaf = x.clone().requires_grad_()
    assert torch.equal(alone, together)
    assert torch.equal(alone, F.rms_norm(leaf, 128, weight, residual=residual))


def test_threads_that_share_a_mask_share_one_summary():
    """If two threads summarize a mask at the same time, both use the same summary."""
    backend, both = get_backend("cpp"), threading.Barrier(2)
    summarize = type(backend).tile_summary

    def wait(tensor):
        both.wait(timeout=10)
        return summarize(backend, tensor)

    mask = masks.dense(torch.rand(1, 1, 96, 96) > 0.5)
    spec = spec_of_mask(mask, 1, 2, 96, 96, torch.device("cpu"))
    seen = []
    work = [threading.Thread(target=lambda: seen.append(with_summaries(spec, wait).dense_summary))]
    work.append(threading.Thread(target=work[0]._target))
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert seen[0] is seen[1] is spec.dense_summary


def test_bias_of_a_type_without_kernels():
    """A float8 bias, which no kernel supports, gives the same results as in float32."""
    x = qkv(1, 2, 8, 16)
    mask = masks.bias(torch.ones(8, 8).to(torch.float8_e5m2))
    got = F.scaled_dot_product_attention(*x, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*x, torch.ones(8, 8)))


def test_without_the_module():
    """Calls fall back to torch if the compiled module cannot be imported."""
    program = (
        "import sys; sys.modules['fused_attn._cpu'] = None\n"
        "import torch, fused_attn\n"
        "x = torch.randn(1, 2, 8, 16)\n"
        "fused_attn.scaled_dot_product_attention(x, x, x); fused_attn.layer_norm(x, 16)\n"
        "try: fused_attn.layer_norm(x, 16, backend='cpp')\n"
        "except NotImplementedError as error: print(error)\n"
        "print(fused_attn.available_backends())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    refusal, backends = done.stdout.splitlines()
    assert "cpp: fused_attn._cpu cannot be imported" in refusal
    others = [name for name in fused_attn.available_backends() if name != "cpp"]
    assert backends == str(tuple(others)), done.stderr
