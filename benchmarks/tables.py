"""Tables of benchmark results, for the terminal and for Markdown pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from case_titles import title
from shapes import DECODE_STEPS

from fused_attn.tools.terminal import aligned

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
LAYOUTS = ("transposed", "contiguous")  # models pass transposed operands
_CACHES = {shape.name: shape for shape in DECODE_STEPS}
LENGTH_WAYS = ("eager", "sdpa", "fused_attn")
GPU_HEADER = ["case", "ms", "throughput", "% of ceiling", "fastest peer", "speedup", "targets"]
_TARGETS = {
    "gflops": "{:,.0f} GFLOP/s",
    "share_of_unmasked": "{:.0%} of the unmasked FLOP/s",
    "share_of_copy": "{:.0%} of copy bandwidth",
    "times_sdpa": "{:.1f}x speedup over sdpa",
}


def by_layout(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the records by layout, transposed first. Records of norms are with the first layout.

    In results that state no layout, the operands are contiguous.
    """
    measured = {record.get("layout") for record in results["records"]}
    layouts = [layout for layout in LAYOUTS if layout in measured] or ["contiguous"]
    return {
        layout: [r for r in results["records"] if r.get("layout", layouts[0]) == layout]
        for layout in layouts
    }


def cpu(results: dict[str, Any]) -> str:
    """Return Markdown tables of speedups over torch: one per layout, with one row per case."""
    ceilings = results["ceilings"]
    about = (
        f"{_cpu_machine(results)}. Ceilings measured in the same run: matmul "
        f"{', '.join(f'{ceilings[dtype]:,.0f} {short}' for dtype, short in DTYPES.items())} "
        f"GFLOP/s (float32 FMA {ceilings['multiply_add']:.0f}); read {ceilings['read']:.0f} GB/s, "
        f"copy {ceilings['copy']:.0f} GB/s."
    )
    parts = [about]
    for layout, records in by_layout(results).items():
        by_case: dict[tuple[str, str], dict[str, Any]] = {}
        for record in records:
            by_case.setdefault((record["group"], record["name"]), {})[record["dtype"]] = record
        rows = [
            [title(*case), *(_cpu_cell(of_dtype.get(dtype), ceilings) for dtype in DTYPES)]
            for case, of_dtype in by_case.items()
        ]
        parts.append(page(f"Attention operands: {layout}.", ["case", *DTYPES], rows))
    below = (
        "Cells show milliseconds, speedup over torch, and percent of the ceiling: matmul of that "
        "type, read bandwidth (decode) or copy bandwidth (norms). The shapes are in "
        "benchmarks/shapes.py."
    )
    return "\n\n".join([*parts, below])


def _cpu_machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"{machine['cpu']}, {machine['threads']} threads, `{machine['isa']}` kernels, torch "
        f"{machine['torch']}"
    )


def _cpu_cell(record: dict[str, Any] | None, ceilings: dict[str, float]) -> str:
    if record is None:
        return ""
    share = _share(record, ceilings)
    of_ceiling = "" if share is None else f", {share:.0%}"
    return f"{record['milliseconds']['fused_attn']:.3g} ({over_torch(record):.1f}x{of_ceiling})"


def _share(record: dict[str, Any], ceilings: dict[str, float]) -> float | None:
    """Return the fraction of the limiting peak rate: matmuls, reading a cache, or copying."""
    if record["name"] in _CACHES:
        read = _CACHES[record["name"]].size.key_bytes(getattr(torch, record["dtype"]))
        return read / (record["milliseconds"]["fused_attn"] * 1e6) / ceilings["read"]
    return record.get("share_of_peak", record.get("share_of_copy"))


def over_torch(record: dict[str, Any]) -> float:
    """Return the speedup over torch's kernels, which a record lists before eager attention."""
    return next(iter(record["speedup"].values()))


def models(results: dict[str, Any]) -> str:
    """Return a Markdown table of full models, with the times of fused_attn and of its peer."""
    rows = []
    for record in results["records"]:
        ours, theirs = record["milliseconds"].values()
        ((peer, speedup),) = record["speedup"].items()
        name = f"{record['group']}, {record['name']} ({record['source']})"
        rows.append([name, peer, f"{theirs:.4g}", f"{ours:.4g}", f"{speedup:.2f}"])
    about = f"{_cpu_machine(results)}, float32; 44 % of each batch is padding."
    return page(about, ["model", "baseline", "torch, ms", "fused_attn, ms", "speedup"], rows)


def busy(results: dict[str, Any]) -> str:
    """Return a Markdown table of calls on oversubscribed cores: medians and 90th percentiles."""
    rows = []
    for record in results["records"]:
        ours, theirs = record["ms"]["fused_attn"], record["ms"]["torch"]
        cells = [record["name"], str(record["busy"])]
        for key in ("median", "p90"):
            cells += [f"{theirs[key]:.2f}", f"{ours[key]:.2f}", f"{theirs[key] / ours[key]:.2f}"]
        rows.append(cells)
    header = ["call", "busy processes", "torch, median ms", "fused_attn, median ms", "speedup"]
    header += ["torch, p90 ms", "fused_attn, p90 ms", "speedup"]
    about = f"{_cpu_machine(results)}, float32; attention is B8 H12 L128 D32."
    return page(about, header, rows, numbers=True)


def lengths(results: dict[str, Any]) -> str:
    """Return a Markdown table of a layer's times and memory, one row per mask and length."""
    rows = []
    for record in results["records"]:
        times, memory, faster = record["milliseconds"], record["memory"], record["speedup"]
        cells = [record["name"], str(length_of(record))]
        cells += [f"{times[way]:.3g}" for way in LENGTH_WAYS]
        cells += [f"{faster[way]:.1f}" for way in ("eager", "sdpa")]
        rows.append(cells + [_megabytes(memory[way]) for way in LENGTH_WAYS])
    header = ["mask", "length", "eager, ms", "torch, ms", "fused_attn, ms"]
    header += [
        "speedup over eager",
        "speedup over torch",
        "eager, MB",
        "torch, MB",
        "fused_attn, MB",
    ]
    source = results["records"][0]["source"].capitalize()
    return page(f"{_cpu_machine(results)}, float32. {source}.", header, rows, numbers=True)


def length_of(record: dict[str, Any]) -> int:
    """Return the sequence length, in tokens, of a record of benchmarks/test_lengths.py."""
    return int(record["group"].removeprefix("length "))


def _megabytes(taken: int | None) -> str:
    return "" if taken is None else f"{taken / 1e6:.0f}"


def page(
    about: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    below: str = "",
    numbers: bool = False,
) -> str:
    """Return a Markdown table between two texts, either of which may be empty.

    Args:
        numbers: right-align all columns except the first.
    """
    rule = ["---", *(["---:" if numbers else "---"] * (len(header) - 1))]
    lines = [about, ""] if about else []
    lines += ["| " + " | ".join(header) + " |", "|" + "|".join(rule) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", below] if below else lines)


def replaced(text: str, name: str, inner: str) -> str:
    """Return the text of a page with the part between the markers of a name replaced."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    for line in (begin, end):
        if line not in text:
            raise ValueError(f"a page must have the line {line}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{inner}\n{end}{after}"


# ---- GPU ----------------------------------------------------------------------------------------


def gpu_text(results: dict[str, Any]) -> str:
    """Return a terminal table of GPU results, then the peers not measured and the reasons."""
    table = [GPU_HEADER, *map(gpu_row, results["records"])]
    lines = [_gpu_machine(results), "", aligned(table[0], table[1:])]
    lines += [
        f"{record['group']} {record['name']}: {name} is not available: {reason}"
        for record in results["records"]
        for name, reason in record.get("not_available", {}).items()
    ]
    return "\n".join(lines)


def gpu_row(record: dict[str, Any]) -> list[str]:
    """Return the cells of GPU_HEADER for a record."""
    case = f"{record['group']} {record['name']} {DTYPES[record['dtype']]}"
    if "milliseconds" not in record:
        failed = record.get("check", "").startswith("FAILED")
        return [case, "", "", "", "", "", record["check"] if failed else "not measured"]
    rate, share = "", ""
    if "gflops" in record:
        rate, share = f"{record['gflops'] / 1e3:.0f} TFLOP/s", f"{record['share_of_peak']:.0%}"
    elif "gigabytes_a_second" in record:
        rate, share = f"{record['gigabytes_a_second']:.0f} GB/s", f"{record['share_of_copy']:.0%}"
    peer, ratio = "", ""
    if record["speedup"]:
        peer, speedup = min(record["speedup"].items(), key=lambda item: item[1])
        ratio = f"{speedup:.2f}x"
    targets = [
        f"{_TARGETS[name].format(record[name])} ({'met' if aim['met'] else 'NOT MET'}: "
        f"{_TARGETS[name].format(aim['wanted'])})"
        for name, aim in record["aims"].items()
    ]
    ours = record["milliseconds"]["fused_attn"]
    return [case, f"{ours:.4g}", rate, share, peer, ratio, ", ".join(targets)]


def _gpu_machine(results: dict[str, Any]) -> str:
    """Return a line that describes the GPU and its peak rates."""
    machine, limits = results["machine"], results["ceilings"]
    return (
        f"{machine['gpu']}, `{results['backend']}` kernels, torch {machine['torch']}, Triton "
        f"{machine['triton']}. Ceilings measured in the same run: {limits['matmul'] / 1e3:.0f} "
        f"TFLOP/s bfloat16 matmul, {limits['copy']:.0f} GB/s copy."
    )
