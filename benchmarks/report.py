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
README = HERE.parent / "README.md"
PERFORMANCE_PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
HEADLINE_BEGIN, HEADLINE_END = "<!-- headline: begin -->", "<!-- headline: end -->"
MODELS_BEGIN, MODELS_END = "<!-- model benchmarks: begin -->", "<!-- model benchmarks: end -->"
LENGTHS_PAGE = HERE.parent / "docs" / "quadratic-cost.md"
LENGTHS_BEGIN, LENGTHS_END = "<!-- lengths: begin -->", "<!-- lengths: end -->"
EXAMPLES_PAGE = HERE.parent / "examples" / "README.md"
EXAMPLES_BEGIN, EXAMPLES_END = "<!-- examples: begin -->", "<!-- examples: end -->"
BUSY_BEGIN, BUSY_END = "<!-- busy: begin -->", "<!-- busy: end -->"
ENGINES_PAGE = HERE.parent / "docs" / "engines.md"
CHECKS_BEGIN, CHECKS_END = "<!-- gpu checks: begin -->", "<!-- gpu checks: end -->"
GPU_BEGIN, GPU_END = "<!-- gpu benchmarks: begin -->", "<!-- gpu benchmarks: end -->"
RIVALS_PAGE = HERE.parent / "docs" / "rivals.md"
RIVALS_BEGIN, RIVALS_END = "<!-- rivals: begin -->", "<!-- rivals: end -->"
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
    for name, results in cpus().items():
        for group in measured_groups(results):
            plot(results, group, HERE / "results" / plot_name(name, group))
    for page in (README, PERFORMANCE_PAGE):
        page.write_text(with_results(page, page.read_text("utf-8")), "utf-8")
    lengths = json.loads((HERE / "results" / "lengths.json").read_text())
    lengths_plot.draw(lengths, HERE / "results" / "lengths.svg")
    write_into(LENGTHS_PAGE, LENGTHS_BEGIN, LENGTHS_END, tables.lengths(lengths))
    trained = examples_table.markdown(
        HERE / "results" / "examples", "../benchmarks/results/examples"
    )
    write_into(EXAMPLES_PAGE, EXAMPLES_BEGIN, EXAMPLES_END, trained)
    checks = gpu_tables.all_of(gpu_sessions(), gpu_tables.engines)
    write_into(ENGINES_PAGE, CHECKS_BEGIN, CHECKS_END, checks)
    compared = []
    for path in sorted((HERE / "results").glob("rivals-*.json")):
        results = json.loads(path.read_text())
        rival_tables.draw(results, path.with_suffix(".svg"))
        drawn = f"../benchmarks/results/{path.stem}.svg"
        compared.append(rival_tables.markdown(results, drawn))
    write_into(RIVALS_PAGE, RIVALS_BEGIN, RIVALS_END, "\n\n".join(compared))


def cpus() -> dict[str, dict[str, Any]]:
    """Return the results of each measured CPU model, by file stem."""
    return {
        p.stem: json.loads(p.read_text()) for p in sorted((HERE / "results").glob("cpu-*.json"))
    }


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


def with_results(page: Path, text: str) -> str:
    """Return the text of README.md or docs/performance.md with the results updated."""
    results = HERE / "results"
    models = json.loads((results / "models.json").read_text())
    if page == README:
        table = readme_table.markdown(list(cpus().values()), models)
        return replaced(text, HEADLINE_BEGIN, HEADLINE_END, table)
    text = replaced(text, BEGIN, END, "\n\n".join(shown(*each) for each in cpus().items()))
    text = replaced(text, MODELS_BEGIN, MODELS_END, tables.models(models))
    beside = json.loads((results / "busy.json").read_text())
    text = replaced(text, BUSY_BEGIN, BUSY_END, tables.busy(beside))
    speeds = gpu_tables.all_of(gpu_sessions(), gpu_tables.performance)
    return replaced(text, GPU_BEGIN, GPU_END, speeds)


def gpu_sessions() -> list[dict[str, Any]]:
    """Return the results of each measured GPU."""
    return [json.loads(p.read_text()) for p in sorted((HERE / "results").glob("gpu-*.json"))]


def write_into(page: Path, begin: str, end: str, inner: str) -> None:
    """Replace the text between two marker lines of a page, and write the page."""
    page.write_text(replaced(page.read_text("utf-8"), begin, end, inner), "utf-8")


def replaced(text: str, begin: str, end: str, inner: str) -> str:
    """Return the text with the part between two marker lines replaced."""
    for line in (begin, end):
        if line not in text:
            raise ValueError(f"a page must have the line {line}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{inner}\n{end}{after}"


if __name__ == "__main__":
    main()
