"""Packed sequences, caches and norms on the backends that calls run on by default on a GPU."""

from __future__ import annotations

import pytest
import torch
from devices import BACKENDS, DEVICE, DTYPES, deterministic, named
from helpers import drawn, short
from judging import assert_judged
from norm_cases import norm, tensors_of

import fused_attn as fa
from fused_attn import masks

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)
kinds = pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])

# ---- packed sequences ---------------------------------------------------------------------------

ENDS_Q, ENDS_K = [0, 11, 11, 40], [0, 17, 20, 64]
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bottom_right": {"attn_mask": masks.causal(align="bottom_right")},
    "window": {"attn_mask": masks.sliding_window(4, 2)},
}


def packed_tensors(num_heads_kv=2, head_dim=40):
    generator = drawn(1)
    sizes = (40, 4), (64, num_heads_kv), (64, num_heads_kv)
    made = [torch.randn(*size, head_dim, generator=generator) for size in sizes]
    return dict(zip(("query", "key", "value"), made, strict=True))


@every_backend
@every_dtype
@pytest.mark.parametrize("name", MASKS)
def test_varlen(name, dtype, backend):
    """Sequences of unequal length, one of them without queries."""

    def of(backend):
        def call(query, key, value):
            ends = (torch.tensor(e, device=query.device) for e in (ENDS_Q, ENDS_K))
            out = fa.varlen_attention(
                query, key, value, *ends, 29, 44, backend=backend, **MASKS[name]
            )
            return (out,)

        return call

    assert_judged(of, packed_tensors(), dtype, backend)


@every_backend
@every_dtype
def test_varlen_int32_ends_and_lse(dtype, backend):
    def of(backend):
        def call(query, key, value):
            ends = (
                torch.tensor(e, device=query.device, dtype=torch.int32) for e in (ENDS_Q, ENDS_K)
            )
            more = {"return_lse": backend != "sdpa", "backend": backend}
            results = fa.varlen_attention(query, key, value, *ends, 29, 44, **more)
            return results[:1] if isinstance(results, tuple) else (results,)

        return call

    assert_judged(of, packed_tensors(), dtype, backend, gradients=False)


# ---- caches -------------------------------------------------------------------------------------


@every_backend
@every_dtype
@pytest.mark.parametrize("page_size", [0, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("seqlen_new", [1, 3])
@pytest.mark.parametrize("host", [False, True], ids=["on_device", "on_host"])
def test_decode(host, seqlen_new, page_size, dtype, backend):
    """Two steps. What is behind the lengths is NaN; the caches are as expected, too."""
    generator, steps = drawn(2), 2
    sizes = {"query": 4, "key": 2, "value": 2}
    tensors = {
        name: torch.randn(steps, 2, heads, seqlen_new, 40, generator=generator)
        for name, heads in sizes.items()
    }
    for name in ("key_cache", "value_cache"):
        tensors[name] = torch.randn(2, 2, 64, 40, generator=generator)

    def of(backend):
        def call(query, key, value, key_cache, value_cache):
            caches, table = [key_cache.clone(), value_cache.clone()], None
            start = [50, 9]
            for cache in caches:
                for rows, length in zip(cache, start, strict=True):
                    rows[:, length:] = float("nan")
            if page_size:
                pages = 64 // page_size
                caches = [
                    c.unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1).contiguous()
                    for c in caches
                ]
                table = torch.arange(2 * pages, device=query.device).view(2, pages)
            lengths = torch.tensor(start, device=query.device)
            outs = []
            for step in range(steps):
                now = start if host else lengths
                out = fa.decode_attention(
                    query[step], *caches, cache_lengths=now, key=key[step], value=value[step],
                    block_table=table, backend=backend,
                )  # fmt: skip
                outs.append(out)
                start, lengths = [n + seqlen_new for n in start], lengths + seqlen_new
            return (*outs, *(cache.nan_to_num() for cache in caches))

        return call

    assert_judged(of, tensors, dtype, backend, gradients=False)


# ---- norms --------------------------------------------------------------------------------------


@every_backend
@every_dtype
@kinds
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("affine", [False, True], ids=["bare", "affine"])
@pytest.mark.parametrize("shape", [(1, 8), (5, 37), (33, 512), (3, 5000)], ids=str)
def test_norms(shape, affine, residual, kind, dtype, backend):
    """Also of float32 parameters and 16-bit inputs."""
    tensors = tensors_of(kind, shape, residual, affine)
    assert_judged(lambda name: norm(kind)(name), tensors, dtype, backend)


@every_backend
@every_dtype
@kinds
def test_norm_dropout_by_the_generator(kind, dtype, backend):
    """Equal seeds give equal bits, and the residual has the same dropped elements."""
    tensors = [t.to(DEVICE, dtype) for t in tensors_of(kind, (64, 96), True, False).values()]
    leaves, function = [t.requires_grad_() for t in tensors], getattr(fa, kind)

    def run(seed):
        torch.manual_seed(seed)
        options = {"dropout_p": 0.25, "return_residual": True, "backend": named(backend)}
        out, total = function(leaves[0], 96, residual=leaves[1], **options)
        loss = (out.float() * torch.arange(96, device=DEVICE)).sum()
        return out, total, *torch.autograd.grad(loss, leaves)

    with deterministic():
        first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    dropped = first[1] == leaves[1]
    assert 0.2 < dropped.float().mean().item() < 0.3
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize("backend", ["eager", "default"])
@every_dtype
@kinds
def test_norm_dropout_by_a_seed(kind, dtype, backend):
    """The elements that the CPU keeps."""
    tensors = tensors_of(kind, (64, 96), True, True)
    assert_judged(norm(kind, dropout_p=0.25, seed=11), tensors, dtype, backend)
