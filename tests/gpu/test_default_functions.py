"""KV caches and norm dropout on the default backends of a GPU.

test_checks.py covers packed sequences and the numerics of norms.
"""

from __future__ import annotations

import pytest
import torch
from devices import BACKENDS, DEVICE, DTYPES, named
from helpers import deterministic, drawn, short
from judging import assert_judged
from norm_cases import tensors_of

import fused_attn as fa

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)
kinds = pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])


@every_backend
@every_dtype
@pytest.mark.parametrize("page_size", [0, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("seqlen_new", [1, 3])
@pytest.mark.parametrize("host", [False, True], ids=["on_device", "on_host"])
def test_decode(host, seqlen_new, page_size, dtype, backend):
    """Two steps update the caches, and NaN beyond the cached lengths has no effect."""
    generator, steps = drawn(2), 2
    sizes = {"query": (steps, 2, 4, seqlen_new), "key": (steps, 2, 2, seqlen_new)}
    sizes |= {"value": sizes["key"], "key_cache": (2, 2, 64), "value_cache": (2, 2, 64)}
    tensors = {n: torch.randn(*size, 40, generator=generator) for n, size in sizes.items()}

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


@every_backend
@every_dtype
@kinds
def test_norm_dropout_by_the_generator(kind, dtype, backend):
    """Equal seeds give bitwise identical results; the dropped fraction is close to dropout_p."""
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
