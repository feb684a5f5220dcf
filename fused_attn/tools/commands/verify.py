"""The command `fused-attn verify`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fused_attn.backends import verdicts, wanted_backend
from fused_attn.backends.registry import BACKENDS
from fused_attn.tools import doctor, plan, verify
from fused_attn.tools.arguments import FAILED, OK, add_json, write_json
from fused_attn.tools.terminal import progress, show_table

HELP = (
    "check and time the GPU kernels on this machine, and make them the default for calls for which "
    "they are correct and faster"
)
EXAMPLES = ("", "--quick", "--backend triton --json verdict.json", "--forget")
SNIPPETS = 3  # maximum number of wrong results that are printed


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument(
        "--backend", choices=list(BACKENDS), nargs="+", metavar="BACKEND",
        help=f"any of {', '.join(BACKENDS)}; default: those that need it and can run here",
    )  # fmt: skip
    command.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(plan.QUICK_DTYPES)}, and head_dim "
        f"up to {' and '.join(map(str, plan.QUICK_WIDTHS))}",
    )  # fmt: skip
    command.add_argument(
        "--forget",
        action="store_true",
        help="remove the stored verdicts for all machines",
    )
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Verify backends, or forget their verdicts; return the exit status."""
    names = options.backend or verify.candidates()
    if options.forget:
        removed = [str(path) for path in verdicts.forget(names)]
        if not write_json(options.json, {"removed": removed}):
            print("\n".join(f"removed {path}" for path in removed) or "nothing was stored")
        return OK
    if options.backend is None:  # skip backends that cannot run; if none can, verify() raises
        names = [name for name in names if not verify.against(name)] or names
    reports: dict[str, verify.Report] = {}
    about = {"versions": doctor.versions(), "machine": doctor.machine()}
    for name in names:
        check_plan = plan.plan(options.quick, graphs=verify.device_of(name).type == "cuda")
        with progress(f"verifying {name}", check_plan.steps) as advance:

            def advanced(report: verify.Report, advance: Any = advance) -> None:
                advance()
                reports[report.backend] = report
                if options.json not in (None, Path("-")):  # an interrupted run keeps its results
                    write_json(options.json, about | _as_facts(reports))

            reports[name] = verify.verify(name, check_plan, advanced)
    if not write_json(options.json, about | _as_facts(reports)):
        for report in reports.values():
            _show(report)
    for report in reports.values():
        if report.not_stored:
            raise OSError(
                f"the verdict on {report.backend} could not be stored: {report.not_stored}"
            )
    return OK if not any(report.wrong for report in reports.values()) else FAILED


def _as_facts(reports: dict[str, verify.Report]) -> dict[str, Any]:
    return {"backends": {name: report.to_dict() for name, report in reports.items()}}


def _show(report: verify.Report) -> None:
    counts, where = report.counts(), f"{report.backend} on {report.identity['gpu']}"
    show_table(
        f"Checks of {where}", ("type", "what", ">right", ">WRONG", ">not taken"), counts,
        bad=[i for i, row in enumerate(counts) if row[3] not in ("", "0")],
    )  # fmt: skip
    for title in ("attention", "norms"):
        features, rows = report.speedups(title == "norms")
        if rows:
            show_table(
                f"Speedup over torch, {title}: {where}; in brackets: not the default",
                ("op", "type", "sizes", "pass", *(f">{name}" for name in features)), rows,
                bad=[i for i, row in enumerate(rows) if "wrong" in row],
            )  # fmt: skip
    for trial in report.wrong[:SNIPPETS]:
        print(report.snippet(trial), end="\n\n")
    if len(report.wrong) > SNIPPETS:
        print(f"and {len(report.wrong) - SNIPPETS} more: --json has them all\n")
    usable, wanted = len(report.usable), wanted_backend()
    print(f"{report.backend}: {len(report.wrong)} of {len(report.trials)} checks are WRONG")
    if report.path is not None:
        print(f"the default from now on for {usable} of {len(report.classes)} classes of calls")
        print(f"stored in {report.path}")
    if wanted is not None:
        print(f"but FUSED_ATTN_BACKEND={wanted} overrides this while it is set")
