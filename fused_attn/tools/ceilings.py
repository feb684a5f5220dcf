"""Peak rates of a CPU. `bench` and the benchmarks report times as fractions of these peaks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from fused_attn.backends.fields import DTYPES
from fused_attn.base.torch_state import dtype_name
from fused_attn.tools.timing import cpu_seconds

_ROUNDS = 7
_ELEMENTS = 16 << 20  # 64 MiB of float32, more than the caches hold
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def cpu_ceilings() -> dict[str, float]:
    """Measure the peak FLOP/s and bytes/s of this CPU with all of torch's threads.

    Returns:
        Rates by name. A dtype's name gives the FLOP/s of the matmuls that attention computes in
        this dtype. With AMX, these are tile products with one operand load each. AMX computes
        float32 as 6 products of bfloat16 parts, and float16 as 3 unless the CPU supports that type.
        Split types load fewer operands and could be slightly faster. "multiply_add" is the FLOP/s
        of float32 SIMD multiply-adds. "copy" counts the bytes read plus the bytes written per
        second. "read" counts the bytes read per second.
    """
    from fused_attn import _cpu  # the other tools do not need the compiled module

    threads = torch.get_num_threads()
    source = torch.ones(_ELEMENTS)
    target = torch.empty_like(source)
    return {
        **{dtype_name(t): _cpu.product_peak(DTYPES[t], threads) for t in _TYPES},
        "multiply_add": _cpu.multiply_add_peak(threads),
        "copy": 2 * source.nbytes / _median(lambda: target.copy_(source)),
        "read": source.nbytes / _median(source.sum),
    }


def format_ceilings(ceilings: dict[str, float]) -> str:
    """Format the ceilings on one line."""
    rates = [f"{ceilings[dtype_name(t)] / 1e9:,.0f} GFLOP/s {dtype_name(t)}" for t in _TYPES]
    return ", ".join([*rates, f"{ceilings['read'] / 1e9:.0f} GB/s read"])


def _median(call: Callable[[], Any]) -> float:
    return statistics.median(cpu_seconds(call) for _ in range(_ROUNDS))
