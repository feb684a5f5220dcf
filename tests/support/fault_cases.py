"""Mistakes and failures of single ranks, and the resulting errors on the other ranks."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from ring_cases import mesh_of
from torch.utils.flop_counter import FlopCounterMode

import fused_attn
from fused_attn import distributed, masks
from fused_attn.distributed import Sharding

LENGTH = 32
KINDS = ("ring", "all_to_all", "decode")


def _call(
    kind: str, mask=None, rows: int = LENGTH // 4, heads: int = 4, dtype=torch.float32,
    needs_grad: bool = True, **options,
):  # fmt: skip
    """Run a call with `rows` rows on this rank, and its backward if it requires gradients."""
    query = torch.randn(1, heads, rows, 8, dtype=dtype)
    query.requires_grad_(needs_grad and kind != "decode")
    mesh = mesh_of((dist.get_world_size(),))
    if kind == "decode":
        return distributed.decode_attention(
            query[:, :, :1], query, query, cache_lengths=[3], mesh=mesh, attn_mask=mask
        )
    function = getattr(distributed, f"{kind}_attention")
    out = function(query, query, query, mask, mesh=mesh, **options)
    if needs_grad:
        out.sum().backward()
    return out


def error_of(mistake: str, kind: str) -> str:
    """Return the error that this rank raises if rank 1 makes a mistake."""
    rank = dist.get_rank()
    wrong, positions = rank == 1, torch.arange(8) + 8 * rank
    dense = torch.ones(1 if kind == "decode" else LENGTH, LENGTH, dtype=torch.bool)
    dense[0, 3] = not wrong
    keys = masks.dense(torch.ones(1, 1, 1, LENGTH, dtype=torch.bool))
    contiguous = Sharding.contiguous(LENGTH, 4)
    options: dict[str, dict[str, Any]] = {
        "mask": {"mask": masks.sliding_window(3 if wrong else 4, 0)},
        "mask tensor": {"mask": dense},
        "second call": {"mask": keys & masks.causal() if wrong else keys},
        "dtype": {"dtype": torch.bfloat16 if wrong else torch.float16},
        "gradient": {"needs_grad": not wrong},
        "seed": {"dropout_p": 0.5, "seed": int(wrong)},
        "rows": {"positions": contiguous, "rows": 7 if wrong else 8},
        "heads": {"heads": 5 if wrong else 4},
        "scale": {"scale": 0.5 if wrong else 1.0},
        "positions": {"positions": positions + wrong},
        "positions of one rank": {"positions": positions[: 7 if wrong else 8]},
        "sharding": {"positions": Sharding.zigzag(LENGTH, 4) if wrong else contiguous},
    }
    try:
        if mistake == "second call":
            _call(kind, keys)
        _call(kind, **options[mistake])
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_cold_caches(kind: str) -> None:
    """Make calls with equal masks that are cached on some ranks only."""
    mask = masks.dense(torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)) & masks.causal()
    _call(kind, mask)
    rank = dist.get_rank()
    with FlopCounterMode(display=False) if rank == 0 else contextlib.nullcontext():
        _call(kind, mask)
    if rank == 1:  # evict the cached values of the mask
        for length in range(2, 40):
            query = torch.zeros(1, 1, length, 4)
            fused_attn.scaled_dot_product_attention(query, query, query, masks.causal())
        mask.memo.clear()
    _call(kind, mask if rank < 2 else masks.dense(mask.dense_masks[0].clone()) & masks.causal())


def survive(kind: str, fault: str, seconds: float) -> tuple[str, float]:
    """Make the last rank fail; return this rank's error and the seconds until it was raised."""
    last = dist.get_rank() == dist.get_world_size() - 1
    _call(kind)  # the first call succeeds
    began = time.perf_counter()
    if last and fault == "dies":
        os._exit(1)
    if last:
        time.sleep(seconds)
        return "", 0.0
    try:
        for _ in range(3):
            _call(kind)
    except (RuntimeError, dist.DistError) as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - began
    return "", time.perf_counter() - began
