"""Random attention problems, half of which are hard for a kernel's rounding.

Hard problems have few visible keys, or one key with nearly all the weight. Their score gradients
are small differences of large terms and expose every rounding. Each problem has a number. To search
a range of them:

    python scripts/random_problems.py --isa avx2 amx --dtype float32 --problems 20000
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from helpers import BACKENDS, INTERPRETED, compare_with_eager, random_qkv, short, use_isa
from torch import Tensor

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.masks import Mask
from fused_attn.tools.contract import Finding

ROUNDINGS = 8  # accumulator roundings allowed in the terms of a score gradient (Problem.judge)


@dataclass(frozen=True)
class Problem:
    """Random attention problem, which is determined by its number and dtype.

    Attributes:
        shape: (batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v).
        kinds: kinds of masks that are combined, from KINDS.
        size: standard deviation of the queries.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    size: float
    scale: float | None
    dropout_p: float

    def __str__(self) -> str:
        shape = "B{} H{} Hk{} Lq{} Lk{} D{} Dv{}".format(*self.shape)
        return (
            f"{self.number}: {shape} {short(self.dtype)}, queries x {self.size:g}, scale "
            f"{self.scale}, dropout {self.dropout_p:g}, {' & '.join(self.kinds) or 'no mask'}"
        )

    def mask(self) -> Mask | None:
        """Return the intersection of the masks of all kinds; None without masks."""
        whole = None
        for kind in self.kinds:
            own = _mask(kind, self.number, self.shape)
            whole = own if whole is None else whole & own
        return whole

    def tensors(self) -> dict[str, Tensor]:
        """Return random query, key and value."""
        tensors = {
            n: t for n, t in random_qkv(*self.shape, seed=self.number).items() if t is not None
        }
        tensors["query"] *= self.size
        return tensors

    def findings(self, backend: str) -> list[Finding]:
        """Return the contract findings for a backend's output and gradients."""
        options: dict[str, Any] = {"scale": self.scale, "dropout_p": self.dropout_p}
        function = out_only(self.mask(), **options)
        return compare_with_eager(function, self.tensors(), self.dtype, backend)[1]

    def judge(self, backend: str) -> Finding:
        """Return the finding with the largest error relative to its limit.

        A score gradient is P (dP - delta), which is about 0 where one key has all the weight. Eager
        attention subtracts equal values there, without any error. Fused kernels compute delta from
        the output, which causes accumulator rounding errors. The limit is raised by ROUNDINGS of
        these.
        """
        tensors = self.tensors()
        roundoff = 2.0**-53 if self.dtype == torch.float64 else 2.0**-24
        scale = self.shape[5] ** -0.5 if self.scale is None else self.scale
        terms = tensors["value"].abs().sum(-1).max().item() / (1.0 - self.dropout_p) * scale
        other = {"grad_query": "key", "grad_key": "query"}
        judged = []
        for finding in self.findings(backend):
            lost = 0.0
            if finding.name in other:
                lost = terms * tensors[other[finding.name]].abs().max().item()
            limit = finding.limit + ROUNDINGS * roundoff * lost
            judged.append(replace(finding, limit=limit))
        return max(judged, key=share)


def out_only(mask: Mask | None, **options: Any) -> Callable[..., Callable[..., tuple[Tensor]]]:
    """Return function(backend)(query, key, value), as `helpers.attention` does, but without lse.

    The gradient of lse would hide the small errors that this search looks for.
    """

    def of(backend: str) -> Callable[..., tuple[Tensor]]:
        def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
            whole = None if mask is None else mask.to(query.device)
            out = F.scaled_dot_product_attention(
                query, key, value, whole, enable_gqa=True, backend=backend, **options
            )
            return (out,)

        return call

    of.key = pickle.dumps(("out only", mask, options))  # type: ignore[attr-defined]
    return of


KINDS = (
    "padding", "causal", "causal_bottom_right", "key_mask", "alibi", "window", "dense",
)  # fmt: skip


def problem(number: int, dtype: torch.dtype | None = None) -> Problem:
    """Return problem `number`, the same in every process; dtype None draws a 16-bit dtype."""
    draw = random.Random(number)
    heads_kv = draw.choice([1, 2, 2, 3])
    head_dim = draw.choice([16, 32, 64, 80, 96, 128, 256])
    drawn = draw.choice([torch.bfloat16, torch.float16])
    return Problem(
        number,
        drawn if dtype is None else dtype,
        (
            draw.choice([1, 2, 3]),
            heads_kv * draw.choice([1, 1, 2]),
            heads_kv,
            draw.choice([1, 2, 3, 5, 8, 17, 33, 40]),
            draw.choice([1, 2, 3, 5, 8, 16, 17, 33, 70]),
            head_dim,
            draw.choice([head_dim, head_dim, 40]),
        ),
        tuple(draw.sample(KINDS, draw.choice([0, 1, 1, 2, 3]))),
        draw.choice([1.0, 3.0, 8.0, 20.0]),
        draw.choice([None, 0.3]),
        draw.choice([0.0, 0.0, 0.0, 0.3]),
    )


def _mask(kind: str, seed: int, shape: tuple[int, ...]) -> Mask:
    batch, heads, _, seqlen_q, seqlen_k, *_ = shape
    generator = torch.Generator().manual_seed(seed)
    if kind == "padding":
        return masks.padding(torch.randint(1, seqlen_k + 1, (batch,), generator=generator))
    if kind == "causal":
        return masks.causal()
    if kind == "causal_bottom_right":
        return masks.causal(align="bottom_right")
    if kind == "alibi":
        return masks.alibi(2.0 ** -torch.arange(1.0, heads + 1))
    if kind == "window":
        return masks.sliding_window(2, 1)
    rows = 1 if kind == "key_mask" else seqlen_q
    return masks.dense(torch.rand(batch, 1, rows, seqlen_k, generator=generator) < 0.4)


def share(finding: Finding) -> float:
    """Return the error as a fraction of the limit."""
    return finding.error / finding.limit if finding.limit > 0.0 else float(finding.error > 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="cpp")
    parser.add_argument(
        "--isa", nargs="*", default=[None], help="instruction sets of the backend cpp"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--problems", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    args = parser.parse_args()
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.repair()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    outside: Counter[str | None] = Counter()
    worst = dict.fromkeys(args.isa, 0.0)
    begin = time.monotonic()
    for number in range(args.first, args.first + args.problems):
        own = problem(number, dtype)
        for isa in args.isa:  # the first ISA computes the reference, which is then cached
            with use_isa(isa) if isa else contextlib.nullcontext():
                finding = own.judge(args.backend)
            if not finding.ok:
                outside[isa] += 1
                print(f"{isa or args.backend}, {own}\n    {finding}", flush=True)
            worst[isa] = max(worst[isa], share(finding))
    for isa in args.isa:
        where = " ".join(filter(None, (args.backend, isa, args.dtype)))
        print(
            f"{where}: {outside[isa]} of {args.problems} outside the contract, worst "
            f"{worst[isa]:.2f} of the limit"
        )
    print(f"{time.monotonic() - begin:.0f} s")
    raise SystemExit(outside.total() > 0)


if __name__ == "__main__":
    main()
