"""Backend "flash": decoding with a KV cache and stand-ins for the engines."""

import random

import flash_models
import pytest
import torch

import fused_attn
from fused_attn import masks


def decoding(number, name):
    """Return out, lse and the caches of a random decoding step on a backend."""
    draw = random.Random(number)
    torch.manual_seed(number)
    heads_kv, batch, capacity = draw.choice([1, 2]), draw.choice([1, 3]), 512
    heads, seqlen_q = heads_kv * draw.choice([1, 3]), draw.choice([1, 1, 4])
    query = torch.randn(batch, heads, seqlen_q, 16, dtype=torch.float64)
    new = torch.randn(2, batch, heads_kv, seqlen_q, 16, dtype=torch.float64)
    pages = draw.choice([None, None, 256, 128])
    rows = (batch, capacity) if pages is None else (batch * capacity // pages, pages)
    caches = torch.randn(2, rows[0], heads_kv, rows[1], 16, dtype=torch.float64)
    table = None if pages is None else torch.randperm(rows[0]).view(batch, -1)
    lengths = torch.tensor([draw.choice([0, draw.randint(0, 300)]) for _ in range(batch)])
    mask = draw.choice(
        [None, masks.sliding_window(9, align="bottom_right"), masks.padding([7] * batch)]
    )
    if draw.random() < 0.3:
        slopes = masks.alibi(torch.rand(heads), "bottom_right")
        mask = slopes if mask is None else mask & slopes
    key, value = (None, None) if draw.random() < 0.2 else new
    # With padding, flash aligns causal masks at the last real key, but decode_attention aligns them
    # at the end of the cache.
    is_causal = mask is None or not mask.paddings
    results = fused_attn.decode_attention(
        query, *caches, cache_lengths=lengths, key=key, value=value, block_table=table,
        attn_mask=mask, scale=0.3, softcap=draw.choice([None, 3.0]), return_lse=True, backend=name,
        is_causal=is_causal,
    )  # fmt: skip
    return *results, caches


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-4"])
def test_decoding(install, name):
    """Decoding matches eager attention, with and without the engine's KV-cache function."""
    install(name)
    count = by_cache_function = 0
    for number in range(60):
        flash_models.calls.clear()
        wanted = decoding(number, "eager")
        try:
            got = decoding(number, "flash")
        except NotImplementedError:
            assert name == "flash-attn-4"  # flash-attn-4 does not support ALiBi
            continue
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        count += 1
        by_cache_function += "cache_seqlens" in flash_models.calls[-1]
    assert count >= 30
    assert 20 <= by_cache_function < count if name == "flash-attn" else by_cache_function == 0
