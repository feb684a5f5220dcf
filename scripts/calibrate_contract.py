"""Count problems where eager attention's error exceeds what the numerics contract expects.

    ATEN_CPU_CAPABILITY=avx2 python scripts/calibrate_contract.py --problems 1000000 --dtype float32

Half of the problems are hard: they have few keys, and queries that are 4 to 20 times as large as
normal. Each element of a batch is a separate problem. The error of a problem is unexpected if
eager's error, minus one rounding of the largest value, exceeds the error of all RUNS runs of
fused_attn/tools/rounding.py.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter

import torch
from torch import Tensor

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.tools.rounding import RUNS, RandomRounding

BATCH = 1000
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


class Batch:
    """Batch of random problems that share a shape and a mask and are seeded by the batch number."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        draw = random.Random(number)
        generator = torch.Generator().manual_seed(number)
        hard = draw.random() < 0.5
        seqlen_q = draw.choice([1, 2, 5, 17])
        seqlen_k = draw.choice([1, 2, 3, 5] if hard else [3, 8, 17, 40, 70, 130])
        head_dim = draw.choice([8, 16, 32, 64, 128])
        size = draw.choice([4.0, 8.0, 20.0] if hard else [1.0, 1.0, 2.0])
        alibi = masks.alibi(torch.tensor([0.5]))
        self.mask = draw.choice([None, masks.causal(), masks.sliding_window(2, 1), alibi])
        shapes = [(BATCH, 1, n, head_dim) for n in (seqlen_q, seqlen_k, seqlen_k)]
        qkv = [torch.randn(s, generator=generator) for s in shapes]
        qkv[0] *= size
        self.qkv = [t.to(dtype) for t in qkv]
        grads = [torch.randn(s, generator=generator) for s in (shapes[0], shapes[0][:3])]
        self.grads = [t.bfloat16() for t in grads]
        self.dtype = dtype

    def run(self, dtype: torch.dtype, rows: Tensor) -> list[Tensor]:
        """Return out, lse and gradients of eager attention in a dtype for problems `rows`."""
        leaves = [t[rows].to(dtype).requires_grad_() for t in self.qkv]
        results = F.scaled_dot_product_attention(
            *leaves, self.mask, return_lse=True, backend="eager"
        )
        finite = [t.masked_fill(t.isinf(), 0.0) for t in results]
        given = [g[rows].to(t.dtype) for g, t in zip(self.grads, finite, strict=True)]
        grads = torch.autograd.grad(finite, leaves, given)
        return [t.detach() for t in (*finite, *grads)]

    def unexpected(self, runs: Counter[int]) -> Tensor:
        """Return the number of problems with an unexpected error, per result. Shape (results,).

        Args:
            runs: counter by number of runs, to which the problems without an unexpected error after
                so many runs are added.
        """
        every = torch.arange(BATCH)
        truth = self.run(torch.float64, every)
        largest = _largest(truth)
        eager = _largest(_errors(self.run(self.dtype, every), truth))
        left = eager - torch.finfo(self.dtype).eps * largest
        for seed in range(RUNS):
            rows = left.gt(0.0).any(0).nonzero().squeeze(1)
            runs[seed] += BATCH - len(rows)
            if not len(rows):
                continue
            for dtype in {self.dtype, torch.promote_types(self.dtype, torch.float32)}:
                with RandomRounding(seed):
                    results = self.run(dtype, rows)
                error = _largest(_errors(results, [t[rows] for t in truth]))
                left[:, rows] = left[:, rows].masked_fill(error >= left[:, rows], 0.0)
        return left.gt(0.0).sum(1)


def _errors(results: list[Tensor], truth: list[Tensor]) -> list[Tensor]:
    return [r.double() - t for r, t in zip(results, truth, strict=True)]


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest absolute value of each result. Shape (results, problems)."""
    return torch.stack([t.abs().flatten(1).amax(1) for t in tensors])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--problems", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    args = parser.parse_args()
    runs: Counter[int] = Counter()
    unexpected = torch.zeros(len(NAMES), dtype=torch.int64)
    numbers = range(args.first, args.first + args.problems // BATCH)
    for number in numbers:
        unexpected += Batch(number, getattr(torch, args.dtype)).unexpected(runs)
    report = {
        "fused_attn": fused_attn.__version__,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": args.dtype,
        "problems": len(numbers) * BATCH,
        "runs": RUNS,
        "beyond": dict(zip(NAMES, unexpected.tolist(), strict=True)),
        "within_after_runs": {n: runs[n] for n in (0, 1, 2, 4, 8, 16, 32, RUNS - 1)},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
