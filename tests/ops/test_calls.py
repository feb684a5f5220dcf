"""Several calls in sequence: cached masks, pooled memory, and per-thread workspaces."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import fused_attn
from fused_attn import _cpu, masks
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
    is_tensor = isinstance(mask, torch.Tensor)
    for changed_in_place in (False, True):
        if changed_in_place:
            changed = mask if is_tensor else mask.tensors()[0]
            changed = changed if changed._base is None else changed._base
            changed.copy_(changed.flip(-1))
        elif is_tensor:
            mask = make()
        fresh = mask.clone() if is_tensor else mask.mapped(torch.clone)
        assert all(
            map(torch.equal, call(*tensors, mask, **options), call(*tensors, fresh, **options))
        )


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
    """Options that are tensors are read in each call."""
    q, k, v = qkv(1, 2, 16, 8)
    causal = torch.tensor(True)
    first = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    causal.fill_(False)
    assert not torch.equal(first, F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    eps = torch.tensor(1e-5)
    first = F.layer_norm(q, 8, eps=eps)
    eps.fill_(10.0)
    assert not torch.equal(first, F.layer_norm(q, 8, eps=eps))


def test_pooled_outputs_do_not_share_memory():
    """The pool does not reuse the memory of live outputs or of their live views."""
    q, k, v = qkv(2, 8, 512, 64)
    first, again = ([F.scaled_dot_product_attention(q, k, v + i) for i in range(4)] for _ in "ab")
    assert all(map(torch.equal, first, again))
    assert len({t.data_ptr() for t in (*first, *again)}) == 8
    view = again[0].transpose(1, 2).reshape(2, 512, 512)[0]
    want = view.clone()
    del first, again
    for i in range(4):
        F.scaled_dot_product_attention(q, k, v - i)
    assert torch.equal(view, want)


def empty(rows):
    return _cpu.empty_tensor((rows, 1000), (1000, 1), 0)


def test_the_pool_reuses_memory():
    _cpu.release_workspace()
    first = empty(1000)
    address = first.data_ptr()
    assert empty(1000).data_ptr() != address
    _cpu.release_workspace()
    del first
    assert empty(1000).data_ptr() == address


@pytest.mark.parametrize("dtype", [-2, 4])
def test_the_pool_refuses_unknown_dtypes(dtype):
    with pytest.raises(ValueError, match="dtype"):
        _cpu.empty_tensor((2,), (1,), dtype)


def test_small_blocks_do_not_displace_a_large_one_from_the_pool():
    _cpu.release_workspace()
    small = [empty(100) for _ in range(100)]
    large = empty(1000)
    address = large.data_ptr()
    del small
    del large
    another = torch.empty(1000, 1000)  # would be this block if the pool had freed it
    assert empty(1000).data_ptr() == address != another.data_ptr()


def test_pooled_outputs_can_be_changed_in_place():
    """Pooled outputs are not views, so autograd allows in-place changes."""
    x, weight, bias = (torch.ones(s, requires_grad=True) for s in ((1024, 512), 512, 512))
    out = F.layer_norm(x, 512, weight, bias)
    out.mul_(2.0)
    out.sum().backward()
    assert torch.allclose(bias.grad, torch.full((512,), 2048.0))


def test_threads_do_not_share_workspace():
    problems = [qkv(1, 4, 200 + 30 * i, 64) for i in range(6)]
    wants = [F.scaled_dot_product_attention(*x) for x in problems]

    def work(i):
        return all(
            torch.equal(F.scaled_dot_product_attention(*problems[i]), wants[i]) for _ in range(20)
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_cuda_graph_capture_bypasses_the_mask_cache(monkeypatch):
    """CUDA graph capture bypasses the mask cache, because masks may change before a replay."""
    x, mask = qkv(1, 2, 40, 16), masks.dense(torch.rand(40, 40) < 0.5)

    def cached():
        F.scaled_dot_product_attention(*x, mask)
        return [entry.value for entry in mask.memo.values()]

    before = cached()
    assert before
    monkeypatch.setattr(memo, "captured", lambda *tensors: bool(tensors))
    assert cached() == before
    mask.memo.clear()
    assert not cached()


@pytest.fixture
def captures(monkeypatch):
    """Return a mock of is_current_stream_capturing, and forget the values of captured graphs."""
    monkeypatch.setattr(memo, "stream_of", lambda device: 7)
    monkeypatch.setattr(memo, "_of_graphs", {})
    with mock.patch.object(torch.cuda, "is_current_stream_capturing") as captures:
        yield captures


def recalled(cached):
    return memo.recall(cached, "key", [], torch.device("cuda"), lambda: torch.ones(3))


def test_a_captured_graph_keeps_the_cached_values_that_it_reads(captures):
    cached = {}
    captures.return_value = False
    first = weakref.ref(recalled(cached))
    captures.return_value = True
    assert recalled(cached) is first()
    cached.clear()
    assert first() is not None


def test_a_value_computed_in_a_captured_graph_is_not_cached(captures):
    """Another graph may be replayed before the graph that computes the value."""
    cached = {}
    captures.return_value = True
    first, second = recalled(cached), recalled(cached)
    assert first is not second and not cached


def test_norms_do_not_depend_on_return_residual():
    """The norm of a sum is bitwise identical with and without return_residual and gradients."""
    x, residual = (torch.randn(64, 128).bfloat16() for _ in "xr")
    call = functools.partial(F.rms_norm, x, 128, torch.ones(128), residual=residual)
    alone, (together, _) = call(), call(return_residual=True)
    x.requires_grad_()
    assert torch.equal(alone, together) and torch.equal(alone, call())


def test_threads_that_share_a_mask_share_one_summary():
    """If two threads summarize a mask at the same time, both use the same summary."""
    backend, both = get_backend("cpp"), threading.Barrier(2)
    summarize = type(backend).tile_summary

    def wait(tensor):
        both.wait(timeout=10)
        return summarize(backend, tensor)

    mask = masks.dense(torch.rand(1, 1, 96, 96) > 0.5)
    spec = spec_of_mask(mask, 1, 2, 96, 96, torch.device("cpu"))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: with_summaries(spec, wait).dense_summary, range(2))
    assert one is two is spec.dense_summary


def test_bias_of_a_type_without_kernels():
    """A float8 bias, which no kernel supports, gives the same results as in float32."""
    x = qkv(1, 2, 8, 16)
    mask = masks.bias(torch.ones(8, 8).to(torch.float8_e5m2))
    got = F.scaled_dot_product_attention(*x, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*x, torch.ones(8, 8)))


def test_calls_fall_back_to_torch_without_the_compiled_module():
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
