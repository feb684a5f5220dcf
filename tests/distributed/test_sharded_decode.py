"""Decoding with a cache that is distributed over four ranks, compared with one process."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_contract, drawn
from ring_cases import decode_on_rank

import fused_attn
from fused_attn import masks
from fused_attn.distributed import Sharding

BATCH, HEADS, HEADS_KV, CAPACITY, HEAD_DIM = 2, 4, 2, 90, 24
LENGTHS, STEPS = [0, 37], (12, 1, 3, 1, 1)
MASKS = {
    "causal": (None, {}),
    "window": (masks.sliding_window(9, align="bottom_right"), {}),
    "softcap": (None, {"softcap": 4.0}),
    "alibi": (masks.alibi(torch.tensor([0.5, 0.1, 0.01, 1.0]), align="bottom_right"), {}),
    "key mask": (masks.dense(torch.rand(BATCH, 1, 1, CAPACITY, generator=drawn(2)) < 0.6), {}),
    "not causal": (None, {"is_causal": False}),
}


def tensors_of(dtype):
    """Return new queries, keys and values, and caches that are NaN beyond the cached length."""
    generator, sizes = drawn(1), {"query": (HEADS, sum(STEPS))}
    sizes |= dict.fromkeys(("key", "value"), (HEADS_KV, sum(STEPS)))
    sizes |= dict.fromkeys(("key_cache", "value_cache"), (HEADS_KV, CAPACITY))
    tensors = {
        name: torch.randn(BATCH, *size, HEAD_DIM, generator=generator).to(dtype)
        for name, size in sizes.items()
    }
    for b, length in enumerate(LENGTHS):
        tensors["key_cache"][b, :, length:] = tensors["value_cache"][b, :, length:] = float("nan")
    return tensors


def in_one_process(tensors, mask, options, backend=None):
    """Return (out, lse) of each step, and the key cache after the last step."""
    caches = [tensors[f"{n}_cache"].clone() for n in ("key", "value")]
    lengths, results, at = torch.tensor(LENGTHS), [], 0
    for count in STEPS:
        new = slice(at, at + count)
        query, key, value = (tensors[n][:, :, new] for n in ("query", "key", "value"))
        results.append(fused_attn.decode_attention(
            query, *caches, cache_lengths=lengths, key=key, value=value, attn_mask=mask,
            return_lse=True, backend=backend, **options,
        ))  # fmt: skip
        lengths, at = lengths + count, at + count
    return results, caches[0]


@pytest.mark.parametrize(
    ("sharding", "dtype"),
    [
        (Sharding.contiguous(CAPACITY, 4), torch.float32),
        (
            Sharding([[range(r * 8 + i, r * 8 + i + 8) for i in (0, 32)] for r in range(4)]),
            torch.bfloat16,
        ),
        (Sharding.of_lengths([50, 0, 1, 39]), torch.float32),
    ],
    ids=["contiguous", "interleaved", "unequal"],
)
@pytest.mark.parametrize("name", MASKS)
def test_steps(name, sharding, dtype, ranks):
    mask, options = MASKS[name]
    tensors = tensors_of(dtype)
    if sharding.length < CAPACITY:  # this sharding has a smaller capacity
        tensors |= {n: t[:, :, : sharding.length] for n, t in tensors.items() if "cache" in n}
        if name == "key mask":
            mask = masks.dense(mask.dense_masks[0][..., : sharding.length])
    results = ranks.run(decode_on_rank, tensors, LENGTHS, sharding, STEPS, mask, options)
    truths, cache = in_one_process({n: t.double() for n, t in tensors.items()}, mask, options)
    eager, _ = in_one_process(tensors, mask, options, "eager")
    order = torch.cat([sharding.positions(r) for r in range(4)]).argsort()
    keys = torch.cat([keys for _, _, keys in results], 2).index_select(2, order)
    torch.testing.assert_close(keys.double(), cache, equal_nan=True, rtol=0, atol=0)
    for outs, lses, _ in results:
        for step in range(len(STEPS)):
            assert torch.equal(outs[step], results[0][0][step]), "ranks differ"
            assert_contract("out", outs[step], truths[step][0], eager[step][0])
            assert_contract("lse", lses[step], truths[step][1], eager[step][1])
