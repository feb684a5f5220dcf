"""Results of the examples (`make examples`) as Markdown for examples/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Examples in the order of their sections in examples/README.md.
NAMES = ("translate", "rnn", "bert", "transfer", "vit", "gpt", "gpt_parallel")


def markdown(folder: Path, relative: str) -> str:
    """Return the claims of each example as Markdown, with measurements and plots.

    Args:
        folder: folder that the examples wrote to.
        relative: path of the same folder relative to the page.
    """
    runs = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in NAMES}
    first = runs[NAMES[0]]
    lines = [
        f"{_machine(first)}, float32 (bert.py: bfloat16 matmuls), seed {first['seed']}, unless a "
        "section names another machine."
    ]
    for name, run in runs.items():
        if run["smoke"]:
            raise ValueError(f"{name}.json must be of a full run, got one of --smoke")
        lines += ["", f"### {name}.py, {run['figures']['seconds']:.0f} seconds", ""]
        if _machine(run) != _machine(first):
            lines += [f"{_machine(run)}.", ""]
        for shown in run["shown"]:
            mark = "" if shown.get("holds", True) else "**not reached:** "
            lines.append(f"- {mark}{shown['text']}")
        longer = tuple(f"{other}_" for other in NAMES if other.startswith(f"{name}_"))
        plots = sorted(p for p in folder.glob(f"{name}_*.png") if not p.name.startswith(longer))
        lines += ["", *(f"![{plot.stem}]({relative}/{plot.name})" for plot in plots)]
    return "\n".join(lines)


def _machine(run: dict[str, Any]) -> str:
    """Return the CPU, its threads and kernels, and torch's version, of a run."""
    machine, threads = run["machine"], run["machine"]["threads"]
    return (
        f"{machine['cpu']}, {threads} thread{'s' if threads != 1 else ''}, `{machine['isa']}` "
        f"kernels, torch {run['versions']['torch']}"
    )
