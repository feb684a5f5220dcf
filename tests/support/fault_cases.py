"""Mistakes and failures of single ranks, and the resulting errors on the other ranks."""

from __future__ import annotations

import contextlib
import os
import time

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
    wrong = dist.get_rank() == 1
    try:
        if mistake == "mask":
            _call(kind, masks.sliding_window(3 if wrong else 4, 0))
        if mistake == "mask tensor":
            dense = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
            dense[0, 3] = not wrong
            dense = dense if kind != "decode" else dense[:1]
            _call(kind, dense)
        if mistake == "second call":
            mask = masks.dense(torch.ones(1, 1, 1, LENGTH, dtype=torch.bool))
            _call(kind, mask)
            _call(kind, mask & masks.causal() if wrong else mask)
        if mistake == "dtype":
            _call(kind, dtype=torch.bfloat16 if wrong else torch.float16)
        if mistake == "gradient":
            _call(kind, needs_grad=not wrong)
        if mistake == "seed":
            _call(kind, dropout_p=0.5, seed=int(wrong))
        if mistake == "rows":
            _call(kind, positions=Sharding.contiguous(LENGTH, 4), rows=7 if wrong else 8)
        if mistake == "heads":
            _call(kind, heads=5 if wrong else 4)
        if mistake == "scale":
            _call(kind, scale=0.5 if wrong else 1.0)
        if mistake == "positions":
            own = torch.arange(8) + 8 * dist.get_rank()
            _call(kind, positions=own + 1 if wrong else own)
        if mistake == "positions of one rank":
            own = torch.arange(7 if wrong else 8) + 8 * dist.get_rank()
            _call(kind, positions=own)
        if mistake == "sharding":
            _call(
                kind,
                positions=Sharding.zigzag(LENGTH, 4) if wrong else Sharding.contiguous(LENGTH, 4),
            )
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_cold_caches(kind: str) -> bool:
    """Return True after calls with equal masks that are cached on some ranks only."""
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
    return True


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


def without_process_group() -> str:
    """Return the error of a call before init_process_group."""
    query = torch.randn(1, 1, 2, 4)
    try:
        fused_attn.distributed.ring_attention(query, query, query)
    except RuntimeError as error:
        return str(error)
    return ""
