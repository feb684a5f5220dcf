"""Small attention operands, and helpers that run a function on a given backend."""

import torch

import fused_attn as fa

SHAPE = (2, 4, 33, 47, 32)  # batch, num_heads, seqlen_q, seqlen_k, head_dim


def qkv(dtype=torch.float32, grad=True, num_heads_kv=4):
    batch, heads, m, n, d = SHAPE
    generator = torch.Generator().manual_seed(0)
    sizes = (batch, heads, m, d), (batch, num_heads_kv, n, d), (batch, num_heads_kv, n, d)
    return [
        torch.randn(*size, generator=generator, dtype=dtype).requires_grad_(grad) for size in sizes
    ]


def by(backend, function):
    """Return the result of a function, with `backend` used for all calls within it."""
    with fa.use_backend(backend):
        return function()


def assert_close_to_eager(function, rtol=0.0, atol=2e-6):
    """Assert that a function returns the same on the backends "sdpa" and "eager"."""
    torch.testing.assert_close(by("sdpa", function), by("eager", function), rtol=rtol, atol=atol)
