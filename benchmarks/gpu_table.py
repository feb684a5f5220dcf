"""The records of a GPU as a table, for the terminal and for docs/performance.md."""

from __future__ import annotations

from typing import Any

HEADER = ["case", "ms", "rate", "of ceiling", "best peer", "ratio", "aims"]
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_LABELS = {
    "teraflops": "{:.0f} TFLOP/s",
    "share_of_unmasked": "{:.0%} of unmasked",
    "share_of_copy": "{:.0%} of copy",
    "times_sdpa": "{:.1f}x sdpa",
}


def rows(results: dict[str, Any]) -> list[list[str]]:
    """A row of text for each record."""
    return [_row(record) for record in results["records"]]


def _row(record: dict[str, Any]) -> list[str]:
    case = f"{record['group']} {record['name']} {_SHORT[record['dtype']]}"
    if "milliseconds" not in record:
        failed = record.get("check", "").startswith("FAILED")
        return [case, "", "", "", "", "", record["check"] if failed else "not measured"]
    rate, share = "", ""
    if "teraflops" in record:
        rate, share = f"{record['teraflops']:.0f} TFLOP/s", f"{record['share_of_matmul']:.0%}"
    elif "gigabytes_a_second" in record:
        rate, share = f"{record['gigabytes_a_second']:.0f} GB/s", f"{record['share_of_copy']:.0%}"
    peer, ratio = "", ""
    if record["speedup"]:
        peer, speedup = min(record["speedup"].items(), key=lambda item: item[1])
        ratio = f"{speedup:.2f}x"
    aims = [
        f"{_LABELS[name].format(record[name])} ({'met' if aim['met'] else 'NOT MET'}: "
        f"{_LABELS[name].format(aim['wanted'])})"
        for name, aim in record["aims"].items()
    ]
    ours = record["milliseconds"]["fused_attn"]
    return [case, f"{ours:.4g}", rate, share, peer, ratio, ", ".join(aims)]


def ceilings(results: dict[str, Any]) -> str:
    """One line on the machine and what it reaches."""
    machine, limits = results["machine"], results["ceilings"]
    return (
        f"{machine['gpu']}, `{results['backend']}` kernels, torch {machine['torch']}, Triton "
        f"{machine['triton']}. Ceilings in the same run: {limits['matmul'] / 1e3:.0f} TFLOP/s of a "
        f"bfloat16 product, {limits['copy']:.0f} GB/s copied."
    )


def text(results: dict[str, Any]) -> str:
    """Aligned for a terminal; then what could not be measured, and why."""
    table = [HEADER, *rows(results)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    lines = [ceilings(results), ""]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines += [
        f"{record['group']} {record['name']}: {name} is not there: {reason}"
        for record in results["records"]
        for name, reason in record.get("not_available", {}).items()
    ]
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """For docs/performance.md."""
    table = [HEADER, ["---"] * len(HEADER), *rows(results)]
    lines = [ceilings(results), "", *("| " + " | ".join(row) + " |" for row in table)]
    lines += ["", "The ratio is to the fastest peer. Sizes: benchmarks/gpu_shapes.py."]
    return "\n".join(lines)
