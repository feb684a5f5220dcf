"""Benchmark tile sizes on this machine's GPU, and print rows for the tables of tuning.py.

    python scripts/tune_triton.py --pass fwd dq --dtype bf16 --head-dim 64 128

A candidate is valid if it compiles, fits on the GPU, and returns the results of the current row.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.backends.triton import tuning
from fused_attn.backends.triton.launch import arch_of
from fused_attn.backends.triton.tuning import Config
from fused_attn.functional import scaled_dot_product_attention

PASSES = ("fwd", "dq", "dkdv", "fwd_masked", "dq_masked", "dkdv_masked", "decode")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
Call = Callable[[], list[Tensor]]

_SEQLEN, _TOKENS, _HIDDEN = 4096, 16384, 2048
_CACHE, _DECODE_BATCH, _DECODE_HEADS, _DECODE_HEADS_KV = 8192, 64, 32, 8
_WARMUP, _SAMPLES = 2, 9
# Allowed difference from the current config in units of eps, by element size in bytes. Configs
# differ in the order of summation. For 16-bit results, the final rounding dominates.
_ROUNDINGS = {2: 4.0, 4: 64.0}


class Found(NamedTuple):
    """Fastest config, default config, and the speedup of the fastest over the default."""

    config: Config
    default: Config
    speedup: float


def candidates(kind: str, element_size: int, head_dim: int, shared_memory: int) -> list[Config]:
    """Return configs that fit in shared memory and compute 16 to 64 scores per thread and tile.

    For decode, the minimum is 2 scores per thread.

    Args:
        kind: one of `PASSES`.
        element_size: size of an element in bytes.
        shared_memory: shared memory per program in bytes.
    """
    stages: tuple[int, ...] = (2, 3) if element_size < 4 else (1, 2, 3)
    owned: tuple[int, ...] = (64, 128)
    streamed, warps, fewest = (32, 64, 128), (4, 8), 16
    if kind == "decode":  # few query rows per tile, and limited by memory bandwidth
        owned, warps, fewest = (16,), (2, 4), 2
        stages = (*stages, 4)
    configs = []
    for own, other, num_warps, num_stages in itertools.product(owned, streamed, warps, stages):
        scores = own * other // (32 * num_warps)
        if not fewest <= scores <= 64:
            continue
        blocks = (other, own) if kind.startswith("dkdv") else (own, other)
        config = Config(*blocks, num_warps, num_stages)
        if shared_bytes(kind, config, element_size, head_dim) <= shared_memory:
            configs.append(config)
    return configs


def shared_bytes(kind: str, config: Config, element_size: int, head_dim: int) -> int:
    """Return the shared memory of a program's tiles in bytes.

    The tiles are the resident ones, and two streamed tiles per stage. On sm_90, the compiler
    allocates up to 2 KB more than this for 16-bit types, and less than this for float32.
    """
    own, other = config.block_m, config.block_n
    if kind.startswith("dkdv"):
        own, other = other, own
    resident_tiles = 2 if kind.startswith(("dq", "dkdv")) else 1
    rows = resident_tiles * own + 2 * config.num_stages * other
    return rows * head_dim * element_size


@contextlib.contextmanager
def override(
    kind: str, arch: str, element_size: int, head_dim: int, config: Config
) -> Iterator[None]:
    """Replace the table's config for `head_dim` by `config` within the block."""
    if arch not in tuning.TABLES:
        raise ValueError(f"tuning.TABLES must have an entry for {arch}, to be tuned")
    table, key = tuning.TABLES[arch], (kind, element_size)
    before = table.get(key)
    table[key] = {**(before or {}), head_dim: config}
    try:
        yield
    finally:
        if before is None:
            del table[key]
        else:
            table[key] = before


def calls_of(kind: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> list[Call]:
    """Return the calls whose times measure a pass.

    A call may include other work, which is the same for every candidate.
    """
    torch.manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, device=device)

    if kind == "decode":
        query = random(_DECODE_BATCH, _DECODE_HEADS, 1, head_dim)
        key, value = (random(_DECODE_BATCH, _DECODE_HEADS_KV, _CACHE, head_dim) for _ in "kv")
        return [_forward([query, key, value], None, 0.0)]
    size = (_TOKENS // _SEQLEN, max(1, _HIDDEN // head_dim), _SEQLEN, head_dim)
    operands = [random(*size) for _ in "qkv"]
    ids = torch.arange(_SEQLEN, device=device) // 1000
    plain = [(None, 0.0), (masks.causal(), 0.0)]
    masked = [(masks.documents(ids), 0.0), (None, 0.1)]
    settings = masked if kind.endswith("_masked") else plain
    if kind.startswith("fwd"):
        return [_forward(operands, *setting) for setting in settings]
    grad = random(*size)
    return [_backward(operands, grad, *setting) for setting in settings]


def _attend(operands: list[Tensor], mask: masks.Mask | None, dropout_p: float) -> Tensor:
    query, key, value = operands
    if dropout_p > 0.0:
        torch.manual_seed(0)  # the same dropout mask for every candidate
    out = scaled_dot_product_attention(
        query, key, value, mask, dropout_p, enable_gqa=True, backend="triton"
    )
    assert isinstance(out, Tensor)
    return out


def _forward(operands: list[Tensor], mask: masks.Mask | None, dropout_p: float) -> Call:
    return lambda: [_attend(operands, mask, dropout_p)]


def _backward(
    operands: list[Tensor], grad: Tensor, mask: masks.Mask | None, dropout_p: float
) -> Call:
    leaves = [t.detach().requires_grad_() for t in operands]
    out = _attend(leaves, mask, dropout_p)
    return lambda: list(torch.autograd.grad(out, leaves, grad, retain_graph=True))


def seconds_of(call: Call) -> float:
    """Return the median GPU time of a call in seconds."""
    for _ in range(_WARMUP):
        call()
    samples = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(samples)


def tune(
    kind: str,
    arch: str,
    element_size: int,
    head_dim: int,
    calls: list[Call],
    tried: list[Config],
    timer: Callable[[Call], float] = seconds_of,
) -> Found:
    """Return the fastest of the default and `tried`, by mean time relative to the default."""
    default = tuning.config(kind, arch, element_size, head_dim)
    wanted = [call() for call in calls]
    base = [timer(call) for call in calls]
    best = Found(default, default, 1.0)
    for config in tried:
        with override(kind, arch, element_size, head_dim, config):
            try:
                for call, results in zip(calls, wanted, strict=True):
                    _check(call(), results, element_size)
                times = [timer(call) for call in calls]
            except Exception as error:  # the compiler and the GPU raise various exceptions
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                print(f"{kind} {config}: {reason[:100]}", file=sys.stderr)
                continue
        speedup = 1.0 / statistics.mean(t / b for t, b in zip(times, base, strict=True))
        shown = ", ".join(f"{1e3 * t:.3f}" for t in times)
        print(f"{kind} {config}: {shown} ms, {speedup:.3f} times as fast", file=sys.stderr)
        if speedup > best.speedup:
            best = Found(config, default, speedup)
    return best


def _check(got: list[Tensor], wanted: list[Tensor], element_size: int) -> None:
    for g, w in zip(got, wanted, strict=True):
        limit = _ROUNDINGS[element_size] * torch.finfo(w.dtype).eps * w.abs().max().item()
        worst = (g.float() - w.float()).abs().max().item()
        if not worst <= limit:
            raise ValueError(f"results differ by {worst:.2e}, more than {limit:.2e}")


def rows(arch: str, gpu: str, found: dict[tuple[str, int], dict[int, Found]]) -> str:
    """Format the results as rows of the tables in tuning.py."""
    lines = [f'    "{arch}": {{']
    for (kind, element_size), by_head_dim in found.items():
        measured = [f"{width} {f.speedup:.2f}x" for width, f in by_head_dim.items()]
        row = {w: tuning.config(kind, arch, element_size, w) for w in tuning.WIDTHS}
        row |= {width: f.config for width, f in by_head_dim.items()}
        lines.append(f"        # {gpu}: {', '.join(measured)} as fast as the row before")
        configs = ", ".join(str(dataclasses.astuple(config)) for config in row.values())
        lines.append(f'        ("{kind}", {element_size}): _row({configs}),')
    return "\n".join([*lines, "    },"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pass", dest="kinds", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("tune: requires a GPU, but torch finds none")
    device = torch.device("cuda", torch.cuda.current_device())
    arch, properties = arch_of(device).name, torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    found: dict[tuple[str, int], dict[int, Found]] = {}
    for kind, dtype, head_dim in itertools.product(options.kinds, options.dtype, options.head_dim):
        element_size, head_dim = DTYPES[dtype].itemsize, tuning.width_of(head_dim)
        tried = candidates(kind, element_size, head_dim, shared_memory)
        calls = calls_of(kind, DTYPES[dtype], head_dim, device)
        result = tune(kind, arch, element_size, head_dim, calls, tried)
        found.setdefault((kind, element_size), {})[head_dim] = result
    print(rows(arch, properties.name, found))


if __name__ == "__main__":
    main()
