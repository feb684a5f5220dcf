"""Write plots of results, and tables in docs/ and README.md: `python benchmarks/report.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import examples_table
import gpu_tables
import matplotlib
import readme_table
import rival_tables
import tables

matplotlib.use("Agg")
import lengths_plot
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROOT = HERE.parent
GROUPS = ("forward", "backward", "training", "packed", "norm forward", "norm backward")


def plot(results: dict[str, Any], group: str, path: Path) -> None:
    """Plot the speedups of a group's cases as bars by dtype, in the first layout, to a file."""
    first = next(iter(tables.by_layout(results).values()))
    records = [r for r in first if r["group"] == group]
    names = list(dict.fromkeys(r["name"] for r in records))
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    figure, axes = plt.subplots(figsize=(1.2 + 0.7 * len(names), 3.6), layout="constrained")
    width = 0.8 / len(dtypes)
    for i, dtype in enumerate(dtypes):
        at = {r["name"]: tables.over_torch(r) for r in records if r["dtype"] == dtype}
        axes.bar(
            [x + i * width for x in range(len(names)) if names[x] in at],
            [at[name] for name in names if name in at],
            width,
            label=dtype,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        [x + 0.4 - width / 2 for x in range(len(names))], names, rotation=40, ha="right"
    )
    axes.set(
        yscale="log",
        ylabel="speedup over torch",
        title=f"{group} on {results['machine']['cpu']}",
    )
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "fused_attn"  # equal results produce equal files
    for name, results in matching("cpu").items():
        for group in measured_groups(results):
            plot(results, group, HERE / "results" / plot_name(name, group))
    lengths_plot.draw(read("lengths.json"), HERE / "results" / "lengths.svg")
    for name, results in matching("rivals").items():
        rival_tables.draw(results, HERE / "results" / f"{name}.svg")
    for page, parts in generated().items():
        text = page.read_text("utf-8")
        for part, inner in parts.items():
            text = tables.replaced(text, part, inner)
        page.write_text(text, "utf-8")


def read(name: str) -> dict[str, Any]:
    """Return the results in a file of benchmarks/results."""
    return json.loads((HERE / "results" / name).read_text())


def matching(kind: str) -> dict[str, dict[str, Any]]:
    """Return the results of a kind ("cpu", "gpu" or "rivals") on each machine, by file stem."""
    return {p.stem: read(p.name) for p in sorted((HERE / "results").glob(f"{kind}-*.json"))}


def measured_groups(results: dict[str, Any]) -> list[str]:
    """Return the groups that were measured, in the order of their plots."""
    return [group for group in GROUPS if any(r["group"] == group for r in results["records"])]


def plot_name(name: str, group: str) -> str:
    """Return the file name of a group's plot, given the file stem of the results."""
    return f"{name}-{group.replace(' ', '-')}.svg"


def shown(name: str, results: dict[str, Any]) -> str:
    """Return Markdown with a CPU's table, its first two plots, and links to the others."""
    alt = "speedup over torch, by case and dtype"
    groups = measured_groups(results)
    at = {group: f"../benchmarks/results/{plot_name(name, group)}" for group in groups}
    drawn = [f"![{group}: {alt}]({at[group]})" for group in groups[:2]]
    others = ", ".join(f"[{group}]({at[group]})" for group in groups[2:])
    return "\n\n".join([tables.cpu(results), "\n".join(drawn), f"More plots: {others}."])


def generated() -> dict[Path, dict[str, str]]:
    """Return the generated parts of each page, by the name in their markers."""
    cpus, gpus, models = matching("cpu"), [*matching("gpu").values()], read("models.json")
    drawn = "../benchmarks/results"
    return {
        ROOT / "README.md": {"headline": readme_table.markdown([*cpus.values()], models)},
        ROOT / "docs/performance.md": {
            "benchmarks": "\n\n".join(shown(*each) for each in cpus.items()),
            "model benchmarks": tables.models(models),
            "busy": tables.busy(read("busy.json")),
            "gpu benchmarks": gpu_tables.all_of(gpus, gpu_tables.performance),
        },
        ROOT / "docs/quadratic-cost.md": {"lengths": tables.lengths(read("lengths.json"))},
        ROOT / "docs/engines.md": {"gpu checks": gpu_tables.all_of(gpus, gpu_tables.engines)},
        ROOT / "docs/rivals.md": {
            "rivals": "\n\n".join(
                rival_tables.markdown(results, f"{drawn}/{name}.svg")
                for name, results in matching("rivals").items()
            )
        },
        ROOT / "examples/README.md": {
            "examples": examples_table.markdown(HERE / "results/examples", f"{drawn}/examples")
        },
    }


if __name__ == "__main__":
    main()
