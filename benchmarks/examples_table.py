"""Results of the examples (`make examples`) as Markdown for examples/README.md."""

from __future__ import annotations

import json
from pathlib import Path

# Examples in the order of their sections in examples/README.md.
NAMES = ("translate", "rnn", "bert", "transfer", "vit", "gpt")


def markdown(folder: Path, relative: str) -> str:
    """Return the claims of each example as Markdown, with measurements and plots.

    Args:
        folder: folder that the examples wrote to.
        relative: path of the same folder relative to the page.
    """
    runs = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in NAMES}
    machine, versions = runs[NAMES[0]]["machine"], runs[NAMES[0]]["versions"]
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, `{machine['isa']}` kernels, torch "
        f"{versions['torch']}, float32 (bert.py: bfloat16 matmuls), seed "
        f"{runs[NAMES[0]]['seed']}."
    ]
    for name, run in runs.items():
        if run["smoke"]:
            raise ValueError(f"{name}.json must be of a full run, got one of --smoke")
        lines += ["", f"### {name}.py, {run['figures']['seconds']:.0f} seconds", ""]
        for shown in run["shown"]:
            mark = "" if shown.get("holds", True) else "**not reached:** "
            lines.append(f"- {mark}{shown['text']}")
        plots = sorted(folder.glob(f"{name}_*.png"))
        lines += ["", *(f"![{plot.stem}]({relative}/{plot.name})" for plot in plots)]
    return "\n".join(lines)
