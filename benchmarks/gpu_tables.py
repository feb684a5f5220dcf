"""Tables of GPU sessions (scripts/gpu_session.py): checks, speed, failures, and what they decide.

A session's results.json is committed as results/gpu-<card>.json.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import tables

STATUSES = ("ok", "wrong", "crash", "hang", "refused", "skipped")
FAILED = ("wrong", "crash", "hang")
OURS = "fused_attn"
Row = list[str]


def performance(results: dict[str, Any]) -> str:
    """Return Markdown for docs/performance.md: times and shares of ceilings, failures as rows."""
    rows = [tables.gpu_row(record) for record in measured(results)]
    below = "Speedups are over the fastest peer. The shapes are in benchmarks/shapes.py."
    parts = [tables.page(about(results), tables.GPU_HEADER, rows, below)]
    failed = [  # without torch.compile's traceback, whose files may have other names today
        [
            record["section"],
            _short(record["unit"]),
            record["status"],
            _cell(record["message"].split(": from user code")[0]),
        ]
        for record in results["records"]
        if record["status"] in FAILED
    ]
    header = ["section", "test", "status", "message"]
    parts.append(tables.page(f"Failures: {len(failed)}.", header, failed) if failed else
                 "Failures: none.")  # fmt: skip
    return "\n\n".join(parts)


def engines(results: dict[str, Any]) -> str:
    """Return Markdown for docs/engines.md: checks by section, and the backends' eligibility."""
    counts = defaultdict(Counter)  # type: ignore[var-annotated]
    for record in results["records"]:
        counts[record["section"]][record["status"]] += 1
    rows = [
        [name, *(str(counts[name][status]) for status in STATUSES), f"{section['planned']}"]
        for name, section in results["sections"].items()
    ]
    checks = tables.page(about(results), ["section", *STATUSES, "planned"], rows, numbers=True)
    header = ["backend", "pass", "mask", "cases", "slowest, against sdpa", "default"]
    return f"{checks}\n\n{tables.page('', header, eligibility(results)).strip()}"


def eligibility(results: dict[str, Any]) -> list[Row]:
    """Return a row for each backend, pass and mask that was timed, by the rule of docs/engines.md.

    A backend becomes the default for the class if all of its checks are right and no case of the
    class is slower than torch's SDPA with its most compact mask.
    """
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in measured(results):
        times = record.get("milliseconds", {})
        for name, time in times.items() if "sdpa" in times else ():
            backend = record["backend"] if name == OURS else name.removeprefix(f"{OURS}, ")
            if name.startswith(OURS) and name != f"{OURS}, mask as tensor":
                found[backend, record["group"], record["mask"]].append(times["sdpa"] / time)
    return [
        [backend, group, mask, str(len(speedups)), f"{min(speedups):.2f}x",
         "yes" if right(results, backend) and min(speedups) >= 1.0 else "no"]
        for (backend, group, mask), speedups in sorted(found.items())
    ]  # fmt: skip


def right(results: dict[str, Any], backend: str) -> bool:
    """Return True if checks of a backend ran and none failed."""
    own = [r["status"] for r in results["records"] if f"[{backend}-" in r["unit"]]
    return "ok" in own and not set(own) & set(FAILED)


def measured(results: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the records of benchmarks, in the form of benchmarks/runner.py."""
    return [r["data"]["measured"] for r in results["records"] if "measured" in r["data"]]


def about(results: dict[str, Any]) -> str:
    """Return a line with the card, versions and ceilings of a session."""
    machine, limits = results["machine"], results["ceilings"]
    cards = ", ".join(gpu["name"] for gpu in machine["gpus"])
    line = f"{cards}, torch {machine['torch']}, Triton {machine['triton']}, {machine['driver']}."
    if limits:
        line += (
            f" Ceilings measured in the same session: {limits['matmul'] / 1e3:.0f} TFLOP/s "
            f"bfloat16 matmul, {limits['copy']:.0f} GB/s copy."
        )
    return line


def all_of(sessions: Sequence[dict[str, Any]], table: Any) -> str:
    """Return one table for each session, or a note without any."""
    return "\n\n".join(map(table, sessions)) or "No GPU was measured yet."


def _short(unit: str) -> str:
    return _cell(unit.rpartition("/")[2])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:160]
