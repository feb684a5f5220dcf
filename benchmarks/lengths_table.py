"""What benchmarks/test_lengths.py measured, as a table and as a plot against the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLORS = {"eager": "tab:gray", "sdpa": "tab:orange", "fused_attn": "tab:blue"}
STYLES = {"none": "o-", "causal": "s--", "documents": "^:", "window": "v-."}
LABELS = {"eager": "eager", "sdpa": "torch", "fused_attn": "ours"}
# A mask as a tensor costs eager and torch some more time: a line for all of them is enough to see.
DRAWN = [("eager", "none"), *(("sdpa", mask) for mask in ("none", "causal", "window"))]
DRAWN += [("fused_attn", mask) for mask in STYLES]


def markdown(results: dict[str, Any]) -> str:
    """Times and memory, a row for each mask and length."""
    machine = results["machine"]
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, `{machine['isa']}` kernels, torch "
        f"{machine['torch']}, float32. {results['records'][0]['source'].capitalize()}.",
        "",
        "| mask | length | ms: eager | torch | ours | times as fast: eager | torch "
        "| MB: eager | torch | ours |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in results["records"]:
        times, memory, faster = record["milliseconds"], record["memory"], record["speedup"]
        cells = [record["name"], str(_length(record))]
        cells += [f"{times[way]:.3g}" for way in COLORS]
        cells += [f"{faster[way]:.1f}" for way in ("eager", "sdpa")]
        cells += [_megabytes(memory[way]) for way in COLORS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Time and memory against the length, both logarithmic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for way, mask in DRAWN:
        records = [r for r in results["records"] if r["name"] == mask]
        lengths = [_length(record) for record in records]
        label = LABELS[way] if mask == "none" else f"{LABELS[way]}, {mask}"
        options = {"color": COLORS[way], "label": label, "markersize": 4}
        left.plot(lengths, [r["milliseconds"][way] for r in records], STYLES[mask], **options)
        taken = [(n, r["memory"][way]) for n, r in zip(lengths, records, strict=True)]
        told = [(n, bytes / 1e6) for n, bytes in taken if bytes is not None]
        right.plot(*zip(*told, strict=True), STYLES[mask], **options)
    ticks = sorted({_length(record) for record in results["records"]})
    for axis, what in ((left, "ms"), (right, "MB at the peak")):
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what)
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.suptitle("A training step of one encoder layer")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _length(record: dict[str, Any]) -> int:
    return int(record["group"].removeprefix("length "))


def _megabytes(taken: int | None) -> str:
    return "" if taken is None else f"{taken / 1e6:.0f}"
