"""Table of speedups in README.md, for six kinds of attention calls on each measured CPU."""

from __future__ import annotations

import textwrap
from typing import Any

import tables

DTYPES = ("float32", "bfloat16")
# Names by which readers know the CPUs whose own names have no number.
_GENERATIONS = {
    "AMD EPYC (family 23, model 1)": "AMD EPYC (Zen 1)",
    "AMD EPYC (family 25, model 17)": "AMD EPYC (Zen 4)",
    "AMD EPYC (family 26, model 2)": "AMD EPYC (Zen 5)",
}
# Title of a row, then group and name of its record in the results of `make bench`.
ROWS = (
    ("forward, B2 H8 L2048 D64", "forward", "long"),
    ("backward, B2 H8 L2048 D64", "backward", "long"),
    ("padded batch (62 % real tokens), forward, B8 H8 L1024", "forward", "padding"),
    ("sliding window, forward, L2048", "forward", "window"),
    ("packed sequences, training, L256 to 1024", "packed", "packed"),
    ("dropout 0.1, training, B4 H8 L512", "training", "dropout"),
)


def markdown(cpus: list[dict[str, Any]], models: dict[str, Any]) -> str:
    """Return a Markdown table of attention calls, followed by a sentence on full models.

    The CPU that computes most comes first. CPUs whose results have no transposed operands, the
    layout that models use, are left out.

    Args:
        cpus: results of `make bench`, one entry per CPU.
        models: results of `make bench-models`.
    """
    header, columns = ["speedup over torch, transposed as in models: float32, bfloat16"], []
    for results in sorted(cpus, key=lambda results: -results["ceilings"]["bfloat16"]):
        machine = results["machine"]
        cpu = _GENERATIONS.get(machine["cpu"], machine["cpu"])
        records = tables.by_layout(results).get("transposed")
        if records:
            header.append(f"{cpu}, `{machine['isa']}`, {machine['threads']} threads")
            columns.append(
                {(r["group"], r["name"], r["dtype"]): tables.over_torch(r) for r in records}
            )
    rows = [
        [title, *(", ".join(f"{of[(*case, dtype)]:.1f}" for dtype in DTYPES) for of in columns)]
        for title, *case in ROWS
    ]
    return tables.page("", header, rows, _models(models))


def _models(results: dict[str, Any]) -> str:
    """Return a sentence with the best speedups of a training step and of inference."""
    best: dict[str, dict[str, Any]] = {}
    for record in sorted(results["records"], key=tables.over_torch):
        best[record["group"]] = record
    training, inference = best["model training"], best["model inference"]
    machine = results["machine"]
    sentences = (
        f"Whole models on padded batches, float32, {machine['threads']} threads of "
        f"{machine['cpu']} (`{machine['isa']}`), torch {machine['torch']}: "
        "after the swap, the speedup over torch is "
        f"{tables.over_torch(training):.1f}x for a training step of `nn.TransformerEncoder` "
        f"({training['source']}), and {tables.over_torch(inference):.1f}x for inference "
        f"({inference['source']})."
    )
    return textwrap.fill(sentences, 118, break_on_hyphens=False)
