"""Plot of the results of benchmarks/test_lengths.py over the sequence length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tables import length_of

COLORS = {"eager": "tab:gray", "sdpa": "tab:orange", "fused_attn": "tab:blue"}
STYLES = {"none": "o-", "causal": "s--", "documents": "^:", "window": "v-."}
LABELS = {"eager": "eager", "sdpa": "torch", "fused_attn": "fused_attn"}
# Lines that are drawn. Masks make eager and torch only somewhat slower, so few of theirs are drawn.
DRAWN = [("eager", "none"), *(("sdpa", mask) for mask in ("none", "causal", "window"))]
DRAWN += [("fused_attn", mask) for mask in STYLES]


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot time and memory over the sequence length, on logarithmic axes, to a file."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for way, mask in DRAWN:
        records = [r for r in results["records"] if r["name"] == mask]
        lengths = [length_of(record) for record in records]
        label = LABELS[way] if mask == "none" else f"{LABELS[way]}, {mask}"
        options = {"color": COLORS[way], "label": label, "markersize": 4}
        left.plot(lengths, [r["milliseconds"][way] for r in records], STYLES[mask], **options)
        taken = [(n, r["memory"][way]) for n, r in zip(lengths, records, strict=True)]
        told = [(n, bytes / 1e6) for n, bytes in taken if bytes is not None]
        right.plot(*zip(*told, strict=True), STYLES[mask], **options)
    ticks = sorted({length_of(record) for record in results["records"]})
    for axis, what in ((left, "time, ms"), (right, "peak memory, MB")):
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what)
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.suptitle("A training step of one encoder layer")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
