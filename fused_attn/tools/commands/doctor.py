"""The command `fused-attn doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fused_attn.tools import doctor
from fused_attn.tools.arguments import FAILED, OK, add_backend, one_line, output, write_json
from fused_attn.tools.terminal import show_table

HELP = "show versions, CPU, GPU and backends, and run a self-check of about a second"
EXAMPLES = ("", "--json", "--backend triton")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument(
        "--json", type=output, nargs="?", const=Path("-"), metavar="FILE",
        help="write JSON to a file, or to stdout instead of the tables",
    )  # fmt: skip
    add_backend(command, "check this backend instead of the default ones")


def run(options: argparse.Namespace) -> int:
    """Diagnose the machine; return the exit status."""
    facts = doctor.diagnose(options.backend)
    if not write_json(options.json, facts):
        _show(facts)
    return OK if facts["ok"] else FAILED


def _show(facts: dict[str, Any]) -> None:
    versions = [(name, version or "not installed") for name, version in facts["versions"].items()]
    show_table("Versions", ("package", "version"), versions)
    show_table("Machine", ("what", "value"), list(_machine_rows(facts["machine"])))
    rows = [(entry["name"], _availability(entry)) for entry in facts["backends"]]
    show_table("Backends", ("backend", "state"), rows)
    show_table(
        "Calls, float32",
        ("device", "call", "backend", "reason"),
        [tuple(call.values()) for call in facts["calls"]],
    )
    show_table(
        "Not supported by opt-in backends, bfloat16",
        ("backend", "device", "reason", "calls"),
        [(*list(row.values())[:3], "; ".join(row["calls"])) for row in facts["refusals"]],
    )
    checks = facts["self_check"]
    show_table(
        f"Self-check, {facts['self_check_seconds']:.1f} s: forward and backward against float64",
        ("backend", "problem", "type", "device", "worst", ">error", ">limit", ""),
        [_check_row(check) for check in checks],
        bad=[i for i, check in enumerate(checks) if not check["ok"]],
    )
    for problem in dict.fromkeys(f"{c['backend']}: {c['problem']}" for c in checks if c["problem"]):
        print(one_line(problem))
    failed = sum(not check["ok"] for check in checks)
    print(f"{failed} of {len(checks)} checks FAILED" if failed else _checked(facts))


def _checked(facts: dict[str, Any]) -> str:
    """Return a line that lists the backends that passed and those that were not checked."""
    checked = dict.fromkeys(f"{c['backend']} on {c['device']}" for c in facts["self_check"])
    names = {check["backend"] for check in facts["self_check"]}
    rest = [entry["name"] for entry in facts["backends"] if entry["name"] not in names]
    return f"passed: {', '.join(checked)}; not checked: {', '.join(rest) or 'none'}"


def _machine_rows(machine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    forced = machine["FUSED_ATTN_CPU_ISA"]
    yield "CPU", machine["cpu"]
    yield "instruction set in use", machine["isa"]
    yield "FUSED_ATTN_CPU_ISA", forced or "not set: the best one that was built and runs here"
    yield "threads", str(machine["threads"])
    for gpu in machine["gpus"]:
        yield "GPU", f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}"
    if not machine["gpus"]:
        yield "GPU", "torch finds none"
    if machine["cudnn"]:
        yield "cuDNN", str(machine["cudnn"])


def _availability(entry: dict[str, Any]) -> str:
    return "available" if entry["available"] else f"not available: {entry['reasons'][0]}"


def _check_row(check: dict[str, Any]) -> tuple[str, ...]:
    where = (check["backend"], check["name"], check["dtype"], check["device"])
    if check["problem"]:
        return (*where, "", "", "", "FAILED")
    numbers = (f"{check['error']:.2e}", f"{check['limit']:.2e}")
    return (*where, check["worst"], *numbers, "ok" if check["ok"] else "FAILED")
