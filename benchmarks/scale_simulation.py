"""Simulate ring attention on many ranks from the plans that it would follow.

    python benchmarks/scale_simulation.py [--length 1048576] [--ranks 8 32 128 512] [--json FILE]

No process group is needed: the plan of each rank says which keys it receives and which blocks it
computes in each step. The compute rate and the link rates are arguments. Latencies, tile sizes and
contention in the network are not part of the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import CpuMeter
from tables import replaced

from fused_attn import masks
from fused_attn.distributed import Sharding, balanced_sharding
from fused_attn.distributed.balance import work_of_ranks
from fused_attn.distributed.plan import Step, plan_of
from fused_attn.distributed.ring import AHEAD
from fused_attn.distributed.visible_keys import VisibleKeys
from fused_attn.masks import Mask
from fused_attn.masks.intervals import intervals_of
from fused_attn.masks.spec import spec_of_mask

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
RESULTS = Path(__file__).parent / "results" / "scale.json"
PART = "scale"  # generated part of the page
PASSES = ("forward", "backward")
SOURCES = {
    "documents": "log-normal lengths, as those of files (Downey 2001, The structural cause of file "
    "size distributions); the longest is the context of Llama 3.1 (131,072)",
    "tflops": "assumed for bfloat16 on an H100 SXM: 40 % of its 989 TFLOP/s; Shah et al. 2024, "
    "FlashAttention-3, report 35 % for FlashAttention-2 and up to 75 % for FlashAttention-3",
    "nvlink": "H100 SXM data sheet: 900 GB/s, so 450 GB/s in each direction",
    "infiniband": "one NDR port of 400 Gb/s per GPU",
}


@dataclass(frozen=True)
class Setting:
    """Sizes and rates of the simulated machine.

    Attributes:
        length: number of positions.
        num_heads, num_heads_kv, head_dim: as in one layer of Llama 3.1 8B by default.
        itemsize: bytes per element of keys and values; gradients in transit have 4.
        tflops: attention rate of a rank, 1e12 operations/s of visible pairs.
        nvlink, infiniband: bytes/s in each direction, in 1e9, up to `node` ranks and beyond.
        node: number of ranks that NVLink connects.
        median, sigma, longest: log-normal lengths of documents.
        seed: seed of these lengths.
        window: keys before each query in the window mask.
    """

    length: int = 2**20
    num_heads: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    itemsize: int = 2
    tflops: float = 400.0
    nvlink: float = 450.0
    infiniband: float = 50.0
    node: int = 8
    median: float = 1000.0
    sigma: float = 1.5
    longest: int = 2**17
    seed: int = 0
    window: int = 4096

    def bytes_of_row(self, itemsize: int) -> int:
        """Return the bytes of a key and a value of all heads."""
        return 2 * self.num_heads_kv * self.head_dim * itemsize

    def link(self, ranks: int) -> float:
        """Return the bytes/s of each direction of a link."""
        return (self.nvlink if ranks <= self.node else self.infiniband) * 1e9

    def seconds_of_pair(self, name: str) -> float:
        """Return the time of a visible pair: 2 products forward, 5 backward, 2 FLOPs each."""
        products = {"forward": 2, "backward": 5}[name]
        return 2 * products * self.num_heads * self.head_dim / (self.tflops * 1e12)


def document_lengths(setting: Setting) -> torch.Tensor:
    """Draw lengths of documents whose sum is the length."""
    generator = np.random.default_rng(setting.seed)
    drawn = generator.lognormal(np.log(setting.median), setting.sigma, setting.length)
    lengths = drawn.clip(1, setting.longest).astype(np.int64)
    ends = lengths.cumsum()
    count = int(np.searchsorted(ends, setting.length)) + 1
    lengths[count - 1] -= ends[count - 1] - setting.length
    return torch.from_numpy(lengths[:count])


def cases(setting: Setting) -> dict[str, Mask | None]:
    """Return masks by name."""
    lengths = document_lengths(setting)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
    return {
        "full": None,
        "causal": masks.causal(),
        f"window {setting.window:,}": masks.sliding_window(setting.window),
        "causal documents": masks.causal() & masks.documents(ids),
    }


# ---- plans --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Numbers of all plans, int64 (ranks, steps).

    Attributes:
        pairs: visible pairs that a rank computes in a step.
        wanted, given: rows that it receives and sends for a step; 0 in step 0.
        runs: largest number of runs of a rank.
    """

    pairs: Any
    wanted: Any
    given: Any
    runs: int


class Pairs:
    """Counter of visible pairs of a mask."""

    def __init__(self, mask: Mask | None, length: int) -> None:
        shape = (1, 1, length, length)
        spec = spec_of_mask(mask, *shape, torch.device("cpu"))
        self.visible = VisibleKeys(spec, shape)
        intervals = intervals_of(spec, shape, torch.device("cpu"))
        if not intervals.exact:
            raise ValueError("mask must be exactly described by intervals")
        self._begin, self._end = (t[0].numpy() for t in (intervals.begin, intervals.end))

    def of(self, queries: range, keys: range) -> int:
        """Return the number of visible pairs of queries and keys at some positions."""
        rows = slice(queries.start, queries.stop)
        begin = np.maximum(self._begin[rows], keys.start)
        return int((np.minimum(self._end[rows], keys.stop) - begin).clip(0).sum(dtype=np.int64))

    def of_step(self, step: Step) -> int:
        """Return the number of visible pairs of a step."""
        return sum(self.of(b.queries.positions, b.keys.positions) for b in step.blocks)


def ring_of(sharding: Sharding, pairs: Pairs) -> Ring:
    """Return the numbers of the plans of all ranks."""
    ranks = sharding.ranks
    table = np.zeros((3, ranks, ranks), np.int64)
    for rank in range(ranks):
        for s, step in enumerate(plan_of(sharding, sharding, rank, pairs.visible).steps):
            table[0, rank, s] = pairs.of_step(step)
            if s > 0:
                table[1:, rank, s] = sum(map(len, step.wanted)), sum(map(len, step.sent))
    return Ring(*table, max(map(len, sharding.runs)))


def full_ring(sharding: Sharding, ring: Ring) -> Ring:
    """Return the ring in which each rank receives all keys of all other ranks."""
    rows = np.array([sharding.rows(rank) for rank in range(sharding.ranks)])
    rank, s = np.indices(ring.pairs.shape)
    wanted = np.where(s > 0, rows[(rank - s) % sharding.ranks], 0)
    given = np.where(s > 0, rows[rank], 0)
    return Ring(ring.pairs, wanted, given, ring.runs)


# ---- time ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Times of one pass in seconds, float64 (ranks, steps), by the step that they belong to.

    Attributes:
        compute: of the blocks of a step.
        keys: of the transfer of the keys and values of a step.
        gradients: of the transfer of their gradients; 0 in the forward.
    """

    compute: Any
    keys: Any
    gradients: Any

    @property
    def transfer(self) -> Any:
        """Time of all transfers of a step."""
        return self.keys + self.gradients


def times_of(ring: Ring, setting: Setting, name: str) -> Times:
    """Return the times of a pass. A link sends and receives at once."""
    rows = np.maximum(ring.wanted, ring.given) / setting.link(len(ring.pairs))
    gradients = setting.bytes_of_row(4) if name == "backward" else 0
    return Times(
        ring.pairs * setting.seconds_of_pair(name),
        rows * setting.bytes_of_row(setting.itemsize),
        rows * gradients,
    )


def finished(ring: Ring, times: Times, ahead: int = AHEAD) -> float:
    """Return when the last rank is done.

    A rank requests the keys of step s + ahead when it begins step s, and sends gradients when it
    has computed a step. A transfer begins when both ranks have requested it and their links are
    free. A step begins when its keys are there and the step before is computed.
    """
    ranks = len(times.compute)
    own = np.arange(ranks)
    begun, link = np.zeros((2, ranks))
    arrived = {0: begun}

    def exchange(s: int, ready: Any, takes: Any, receives: Any, sends: Any, sign: int) -> Any:
        source = np.where(receives[:, s] > 0, np.maximum(ready, link)[(own - sign * s) % ranks], 0)
        target = np.where(sends[:, s] > 0, np.maximum(ready, link)[(own + sign * s) % ranks], 0)
        return np.maximum(np.maximum(source, target), np.maximum(ready, link)) + takes[:, s]

    for s in range(1, min(ahead, ranks - 1) + 1):
        link = arrived[s] = exchange(s, begun, times.keys, ring.wanted, ring.given, 1)
    for s in range(ranks):
        begun = np.maximum(begun, arrived[s])
        if s > 0 and s + ahead < ranks:
            link = exchange(s + ahead, begun, times.keys, ring.wanted, ring.given, 1)
            arrived[s + ahead] = link
        begun = begun + times.compute[:, s]
        if s > 0 and times.gradients.any():
            link = exchange(s, begun, times.gradients, ring.given, ring.wanted, -1)
    return float(np.maximum(begun, link).max())


def finished_early(times: Times) -> float:
    """Return when the last rank would be done if all keys were sent at once, in order.

    No rank waits for another to reach a step. The gradients follow at the end.
    """
    arrived = times.keys.cumsum(1)
    begun = np.zeros(len(times.compute))
    for s in range(times.compute.shape[1]):
        begun = np.maximum(begun, arrived[:, s]) + times.compute[:, s]
    return float(np.maximum(begun, arrived[:, -1] + times.gradients.sum(1)).max())


def timed(sharding: Sharding, ring: Ring, setting: Setting, name: str) -> dict[str, float]:
    """Return the simulated times of a pass in ms, and the share of hidden transfers."""
    own, everything = times_of(ring, setting, name), full_ring(sharding, ring)
    total, compute = float(own.transfer.sum()), own.compute.sum(1)
    took, nothing = finished(ring, own), np.zeros_like(own.keys)
    exposed = took - finished(ring, Times(own.compute, nothing, nothing))
    busiest = float(own.transfer.sum(1).max())
    return {
        "compute_ms": float(compute.mean()) * 1e3,
        "transfer_ms": total / sharding.ranks * 1e3,
        "hidden": max(0.0, 1.0 - exposed / busiest) if busiest else 1.0,
        "ms": took * 1e3,
        "early_ms": finished_early(own) * 1e3,
        "full_ring_ms": finished(everything, times_of(everything, setting, name)) * 1e3,
    }


# ---- records ------------------------------------------------------------------------------------


def shardings(
    mask: Mask | None, setting: Setting, ranks: int
) -> Iterator[tuple[str, Sharding, float]]:
    """Yield shardings by name, with the seconds that it took to make them."""
    makers = {
        "contiguous": Sharding.contiguous,
        "zigzag": Sharding.zigzag,
        "balanced": lambda length, ranks: balanced_sharding(mask, length, ranks),
    }
    for name, make in makers.items():
        begin = time.perf_counter()
        sharding = make(setting.length, ranks)
        yield name, sharding, time.perf_counter() - begin


def records(
    setting: Setting, ranks: Sequence[int], only: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one record for each mask, number of ranks and sharding.

    Args:
        only: names of masks; None means all.
    """
    for mask_name, mask in cases(setting).items():
        if only is not None and mask_name not in only:
            continue
        pairs = Pairs(mask, setting.length)
        for count in ranks:
            for name, sharding, making in shardings(mask, setting, count):
                yield {
                    "mask": mask_name,
                    "ranks": count,
                    "sharding": name,
                    "seconds_to_shard": round(making, 3),
                    **record(sharding, pairs, setting),
                }


def record(sharding: Sharding, pairs: Pairs, setting: Setting) -> dict[str, Any]:
    """Return the numbers of one sharding."""
    ring = ring_of(sharding, pairs)
    of_ranks = work_of_ranks(pairs.visible.work, sharding).numpy()
    if not np.array_equal(ring.pairs.sum(1), of_ranks):
        raise RuntimeError("the plans do not compute every visible pair once")
    received, everything = ring.wanted.sum(1), full_ring(sharding, ring).wanted.sum(1)
    row = setting.bytes_of_row(setting.itemsize)
    return {
        "imbalance": float(of_ranks.max() / of_ranks.mean()),
        "runs": ring.runs,
        "keys_received": {"mean": float(received.mean()), "max": int(received.max())},
        "megabytes_received": {
            "mean": float(received.mean() * row / 1e6),
            "max": float(received.max() * row / 1e6),
            "full_ring": float(everything.mean() * row / 1e6),
        },
        "share_of_full_ring": float(received.sum() / everything.sum()),
        **{name: timed(sharding, ring, setting, name) for name in PASSES},
    }


def table(facts: dict[str, Any]) -> str:
    """Return the tables of the page."""
    setting = Setting(**facts["setting"])
    header = ["mask", "ranks", "sharding", "max / mean work", "runs", "keys received, MB"]
    header += ["of a full ring", "hidden, forward", "hidden, backward", "mean compute, forward, ms"]
    header += ["forward, ms", "all keys at once, ms", "full ring, ms", "backward, ms"]
    rule = ["---", "---:", "---", *["---:"] * (len(header) - 3)]
    lines = [about(setting, facts), "", *("| " + " | ".join(r) + " |" for r in (header, rule))]
    shown = set()
    for r in facts["records"]:
        same = r["mask"], r["ranks"], r["imbalance"], r["keys_received"]["mean"], r["runs"]
        if same in shown:
            continue
        shown.add(same)
        cells = [r["mask"], str(r["ranks"]), r["sharding"], f"{r['imbalance']:.2f}", str(r["runs"])]
        cells += [f"{r['megabytes_received']['mean']:,.0f}", f"{r['share_of_full_ring']:.1%}"]
        cells += [f"{r[name]['hidden']:.0%}" for name in PASSES]
        forward = r["forward"]
        times = [forward[name] for name in ("compute_ms", "ms", "early_ms", "full_ring_ms")]
        cells += [_rounded(ms) for ms in (*times, r["backward"]["ms"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rounded(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def about(setting: Setting, facts: dict[str, Any]) -> str:
    """Return the text above the table."""
    return (
        f"One layer with {setting.num_heads} query heads and {setting.num_heads_kv} KV heads of "
        f"{setting.head_dim}, {setting.length:,} positions, bfloat16. Assumed rates: "
        f"{setting.tflops:.0f} TFLOP/s; {setting.nvlink:.0f} GB/s in each direction up to "
        f"{setting.node} ranks (NVLink), {setting.infiniband:.0f} GB/s beyond (InfiniBand). "
        f"Documents: {facts['documents']:,}, log-normal with median {setting.median:.0f} and sigma "
        f"{setting.sigma}. Simulated from the plans of all ranks, fused_attn "
        f"{facts['machine']['fused_attn']}, torch {facts['machine']['torch']}."
    )


def _others(path: Path, setting: Setting, renewed: Sequence[str]) -> list[dict[str, Any]]:
    """Return the records of a file whose masks are not renewed."""
    facts = json.loads(path.read_text())
    if facts["setting"] != vars(setting):
        raise ValueError(f"the setting must be that of {path.name} to update some of its masks")
    return [record for record in facts["records"] if record["mask"] not in renewed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--masks", nargs="+", help="update only the records of these masks")
    for name, value in vars(Setting()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    setting = Setting(**{name: getattr(args, name) for name in vars(Setting())})
    found = _others(args.json, setting, args.masks) if args.masks else []
    for each in records(setting, args.ranks, args.masks):
        found.append(each)
        print(json.dumps(each), flush=True)
    facts = {
        "machine": CpuMeter().machine(),
        "setting": vars(setting),
        "sources": SOURCES,
        "plans": "of all ranks",
        "documents": len(document_lengths(setting)),
        "records": found,
    }
    args.json.write_text(json.dumps(facts, indent=1) + "\n")
    if args.json == RESULTS:
        PAGE.write_text(replaced(PAGE.read_text("utf-8"), PART, table(facts)), "utf-8")


if __name__ == "__main__":
    main()
