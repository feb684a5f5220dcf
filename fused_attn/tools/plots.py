"""PNG plots of `fused-attn compare` and `fused-attn bench`, drawn with matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_attn.tools.bench import OURS, PEER, Result
from fused_attn.tools.comparison import ComparisonReport

_COLORS = {OURS: "tab:blue", PEER: "tab:orange", "eager": "tab:gray", "limit": "tab:red"}
_MAX_LABELS = 150  # more rows are plotted without labels, which bounds the image height


def require() -> None:
    """Raise ValueError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'fused-attn[cli]'")


def plot_comparison(report: ComparisonReport, path: Path) -> None:
    """Plot each tensor's maximum error with eager attention and with fused_attn, and its limit."""
    rows = report.rows
    labeled = len(rows) <= _MAX_LABELS
    figure, axis = _figure(10, 1.5 + 0.14 * min(len(rows), _MAX_LABELS))
    columns = {
        "limit": ("|", [row.limit for row in rows]),
        "eager": ("o", [row.eager_max for row in rows]),
        OURS: (".", [row.fused_max for row in rows]),
    }
    for name, (marker, values) in columns.items():
        axis.plot(values, range(len(rows)), marker, color=_COLORS[name], label=name)
    labels = [f"{row.name}, {row.kind}" for row in rows] if labeled else []
    axis.set_yticks(range(len(labels)), labels, fontsize=6)
    axis.set_ylabel("" if labeled else "layers and parameters, in the order of execution")
    axis.set_title(f"{report.title()}\n{report.verdict()}", fontsize=9)
    _finish(figure, axis, "largest error against float64", path)


def plot_bench(results: Sequence[Result], path: Path) -> None:
    """Plot the milliseconds of fused_attn and SDPA for each measurement, and the speedup."""
    figure, axis = _figure(9, 1.5 + 0.4 * len(results))
    for name in (OURS, PEER):
        timed = [i for i, result in enumerate(results) if name in result.milliseconds]
        times = [results[i].milliseconds[name] for i in timed]
        axis.plot(times, timed, "o", color=_COLORS[name], label=name)
    for i, result in enumerate(results):
        if result.speedup is not None:
            times = list(result.milliseconds.values())
            axis.plot(times, [i, i], color="lightgray", zorder=0)
            axis.annotate(f"   {result.speedup:.2f}x", (max(times), i), va="center", fontsize=8)
    labels = [f"{r.shape}\n{r.mask}, {r.dtype}, {r.direction}" for r in results]
    axis.set_yticks(range(len(results)), labels, fontsize=7)
    axis.margins(x=0.15)
    _finish(figure, axis, "milliseconds", path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its axes, without pyplot, which would select a process-wide backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _finish(figure: Any, axis: Any, what: str, path: Path) -> None:
    axis.set(xscale="log", xlabel=what)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.legend()
    figure.savefig(path, format="png", dpi=120)
