"""What a CPU reaches when nothing else is done: `bench` and the benchmarks show shares of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from fused_attn import _cpu
from fused_attn.backends.fields import DTYPES
from fused_attn.tools.timing import cpu_seconds

_ROUNDS = 7
_ELEMENTS = 16 << 20  # of float32: 64 MiB, more than caches hold
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def cpu_ceilings() -> dict[str, float]:
    """FLOP/s and bytes/s of all of torch's threads together, now.

    Returns:
        By name of a dtype: the rate of the products that attention in it is made of, in tile
        registers with a load of an operand for each. (They multiply float32 in 6 products of
        bfloat16 parts, float16 in 3 where they do not know it; parts load less than that, and could
        reach a little more.) "multiply_add": of float32 vectors.
        "copy": bytes read and written; "read": bytes read.
    """
    threads = torch.get_num_threads()
    source = torch.ones(_ELEMENTS)
    target = torch.empty_like(source)
    return {
        **{name_of(t): _cpu.product_peak(DTYPES[t], threads) for t in _TYPES},
        "multiply_add": _cpu.multiply_add_peak(threads),
        "copy": 2 * source.nbytes / _median(lambda: target.copy_(source)),
        "read": source.nbytes / _median(source.sum),
    }


def shortest(flops: float, nbytes: float, dtype: str, ceilings: dict[str, float]) -> float:
    """Seconds that so many operations and bytes take at least."""
    return max(flops / ceilings[dtype], nbytes / ceilings["read"])


def said(ceilings: dict[str, float]) -> str:
    """In a line."""
    rates = [f"{ceilings[name_of(t)] / 1e9:,.0f} GFLOP/s {name_of(t)}" for t in _TYPES]
    return ", ".join([*rates, f"{ceilings['read'] / 1e9:.0f} GB/s read"])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _median(call: Callable[[], Any]) -> float:
    return statistics.median(cpu_seconds(call) for _ in range(_ROUNDS))
