"""Calls one after the other: unchecked and checked, what is kept, what memory is left."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from helpers import DTYPES, short
from routes import checked_first

import fused_attn
from fused_attn import Mask, _cpu, masks
from fused_attn import functional as F
from fused_attn.backends import get_backend
from fused_attn.masks import memo
from fused_attn.masks.spec import normalize, with_summaries


def qkv(*shape, dtype=torch.float32):
    return [torch.randn(*shape).to(dtype) for _ in range(3)]


class Watching(torch.overrides.TorchFunctionMode):
    """Sends calls through the registered ops."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def through_the_op(*args, **options):
    with Watching():
        return F.scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_second_call_is_the_first(dtype):
    for options in ({}, {"is_causal": True}, {"scale": 0.5}, {"softcap": 3.0}):
        first, second = qkv(2, 3, 40, 16, dtype=dtype), qkv(2, 3, 40, 16, dtype=dtype)
        F.scaled_dot_product_attention(*first, **options)
        got = F.scaled_dot_product_attention(*second, **options)
        assert torch.equal(got, through_the_op(*second, **options))


def call(q, k, v, mask, **options):
    """out, lse and, where they are wanted, gradients."""
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
    """Another mask of the same layout, and the same one with other values."""
    tensors = [t.requires_grad_(grad) for t in qkv(2, 3, 40, 16)]
    first = make()
    call(*tensors, first, **options)
    own = isinstance(first, Mask)
    mask = first if own else make()
    for change in (False, True):
        if change:  # in place
            changed = mask.tensors()[0] if own else mask
            changed = changed if changed._base is None else changed._base
            changed.copy_(changed.flip(-1))
        got = call(*tensors, mask, **options)
        if own:
            mask.memo.clear()
        for a, b in zip(got, call(*tensors, mask, **options), strict=True):
            assert torch.equal(a, b)


def test_what_a_mask_learns():
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


def test_a_learnt_mask_after_another():
    q, k, v = qkv(2, 2, 16, 8)
    q.requires_grad_()
    base = torch.randn(1, 1, 16, 16)
    F.scaled_dot_product_attention(q, k, v, base.expand(2, 2, 16, 16))
    grads = []
    for backend in (None, "eager"):
        mask = base.clone().expand(2, 2, 16, 16).requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, mask, backend=backend)
        grads += torch.autograd.grad(out.square().sum(), mask)
    torch.testing.assert_close(*grads)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": [0.1]}, "dropout_p must be a float"),
        ({"scale": [1.0]}, "scale must be a float"),
        ({"scale": 1j}, "scale must be a float"),
        ({"softcap": [5.0]}, "softcap must be a float"),
        ({"attn_mask": torch.zeros(16, 16).to_sparse()}, "attn_mask must be a dense tensor"),
        ({"query": torch.nested.nested_tensor([torch.randn(2, 16, 8)])}, "must be a dense tensor"),
    ],
)
def test_what_is_refused_gets_its_message(change, message):
    q, k, v = qkv(1, 2, 16, 8)
    with pytest.raises(TypeError, match=message):
        F.scaled_dot_product_attention(**({"query": q, "key": k, "value": v} | change))


def test_second_norm_is_the_first():
    w, b = torch.randn(48), torch.randn(48)
    for run in (
        lambda x: F.layer_norm(x, 48, w, b),
        lambda x: F.layer_norm(x, (48,), None, b),
        lambda x: F.layer_norm(x, (4, 48)),
        lambda x: F.rms_norm(x, 48, w),
        lambda x: F.layer_norm(x, 48, w.requires_grad_(), b),
        lambda x: F.layer_norm(x, 48, residual=x + 1, dropout_p=0.5, return_residual=True)[1],
    ):
        x, y = torch.randn(2, 4, 48), torch.randn(2, 4, 48)
        run(x)
        torch.manual_seed(0)
        got = run(y)
        torch.manual_seed(0)
        with Watching():
            assert torch.equal(got, run(y))


def test_options_are_kept_apart():
    q, k, v = qkv(1, 2, 33, 8)
    plain = F.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(plain, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert not torch.equal(plain, F.scaled_dot_product_attention(q, k, v, scale=0.1))
    x = torch.randn(4, 8)
    assert not torch.equal(F.layer_norm(x, 8), F.rms_norm(x, 8))
    assert not torch.equal(F.layer_norm(x, 8), F.layer_norm(x, (4, 8)))


def test_what_watches_or_chooses_is_heard():
    q, k, v = qkv(1, 2, 33, 8)
    plain = F.scaled_dot_product_attention(q, k, v)
    with fused_attn.use_backend("eager"):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    out = F.scaled_dot_product_attention(q.requires_grad_(), k, v)
    assert out.requires_grad
    q.requires_grad_(False)
    F.scaled_dot_product_attention(q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v)
    F.scaled_dot_product_attention(q, k, v, return_lse=True)
    got = torch.vmap(lambda t: F.scaled_dot_product_attention(t, t, t))(torch.stack([q, q]))
    assert got.shape == (2, *q.shape)
    with pytest.raises(ValueError, match="head_dim"):
        F.scaled_dot_product_attention(q, k[..., :4], v)


def test_pooled_outputs_are_their_own():
    """Large outputs come from a pool: alive together they never share memory."""
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
    assert torch.equal(view, want)  # a view keeps its memory


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


def test_small_blocks_keep_no_large_one_out_of_the_pool():
    def new(rows):
        return _cpu.empty_tensor((rows, 1000), (1000, 1), 0)

    _cpu.release_workspace()
    small = [new(100) for _ in range(100)]
    large = new(1000)
    address = large.data_ptr()
    del small
    del large
    another = torch.empty(1000, 1000)  # would have been given memory that is free
    assert new(1000).data_ptr() == address != another.data_ptr()


def test_validation_comes_first():
    q, k, v = qkv(1, 2, 33, 8)
    F.scaled_dot_product_attention(q, k, v)
    with pytest.raises(TypeError, match="dropout_p"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=False)


def test_pooled_outputs_take_part_in_autograd():
    x = torch.randn(1024, 512, requires_grad=True)
    w, b = torch.ones(512, requires_grad=True), torch.zeros(512, requires_grad=True)
    out = F.layer_norm(x, 512, w, b)
    out.mul_(2.0)  # in place: it is no view
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


def test_a_graph_in_the_making_neither_takes_nor_leaves_what_is_kept(monkeypatch):
    """Its tensors will be others when it is replayed."""
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


def test_a_residual_gives_the_same_with_its_sum_and_without():
    """In 16 bits the norm is that of the sum as it is rounded, whoever asks for it."""
    x, residual = (torch.randn(64, 128).bfloat16() for _ in "xr")
    weight = torch.ones(128)
    alone = F.rms_norm(x, 128, weight, residual=residual)
    together, _ = F.rms_norm(x, 128, weight, residual=residual, return_residual=True)
    leaf = x.clone().requires_grad_()
    assert torch.equal(alone, together)
    assert torch.equal(alone, F.rms_norm(leaf, 128, weight, residual=residual))


@pytest.mark.parametrize("which", range(7))
def test_saved_tensors_that_come_back_with_other_strides(which):
    """As hooks on saved tensors (offloading, compression) may give them back."""
    x = [t.bfloat16() for t in qkv(1, 2, 8, 16)]  # has out_residual, too

    def run(which):
        leaves, unpacked = [t.clone().requires_grad_() for t in x], []

        def unpack(tensor):
            unpacked.append(tensor)
            return tensor.mT.contiguous().mT if len(unpacked) - 1 == which else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
            out = F.scaled_dot_product_attention(*leaves)
        return torch.autograd.grad(out.square().sum(), leaves)

    for got, want in zip(run(which), run(None), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


def test_masks_are_summed_up_once():
    mask, x = masks.dense(torch.rand(1, 1, 96, 96) > 0.5), qkv(1, 2, 96, 16)
    first = F.scaled_dot_product_attention(*x, mask)
    (spec,) = (entry.value for entry in mask.memo.values())
    summary = spec.dense_summary
    assert summary is not None
    assert torch.equal(first, F.scaled_dot_product_attention(*x, mask))
    assert spec.dense_summary is summary


def test_threads_that_share_a_mask_share_one_summary():
    """The second of two that sum it up at once leaves what the first one's kernel reads."""
    backend, both = get_backend("cpp"), threading.Barrier(2)
    summarize = type(backend).tile_summary

    def wait(tensor):
        both.wait(timeout=10)
        return summarize(backend, tensor)

    mask = masks.dense(torch.rand(1, 1, 96, 96) > 0.5)
    spec = normalize(mask, 1, 2, 96, 96, torch.empty(0))
    seen = []
    work = [threading.Thread(target=lambda: seen.append(with_summaries(spec, wait).dense_summary))]
    work.append(threading.Thread(target=work[0]._target))
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert seen[0] is seen[1] is spec.dense_summary


def test_what_the_short_way_leaves_to_the_whole_one():
    x = qkv(1, 2, 8, 16)
    nested = torch.nested.nested_tensor([torch.randn(2, 8, 16)])
    with pytest.raises(TypeError, match="must be a dense tensor"):
        F.scaled_dot_product_attention(nested, nested, nested, masks.causal())
    for shape in ("ab", (1 << 70,), [16.0]):
        with pytest.raises((TypeError, ValueError)):
            F.layer_norm(x[0], shape)
    # No kernel of ours adds eight bits; torch's does, as float32.
    mask = masks.bias(torch.ones(8, 8).to(torch.float8_e5m2))
    got = F.scaled_dot_product_attention(*x, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*x, torch.ones(8, 8)))


def test_without_the_module():
    """Where it cannot be imported, torch computes."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_sums_of_norms(added, rms, dtype):
    """out and the sum of a plain call are those of one that was checked first."""
    norm = functools.partial(F.rms_norm if rms else F.layer_norm, return_residual=True)
    x, weight = torch.randn(3, 5, 40, dtype=dtype), torch.randn(40)
    residual = torch.randn_like(x) if added else None
    with torch.no_grad():
        got = norm(x, (40,), weight, residual=residual)
        with checked_first():
            want = norm(x, (40,), weight, residual=residual)
    assert got[0].shape == got[1].shape == x.shape
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (got[1] is x) == (not added)
