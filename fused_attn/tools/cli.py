"""The command line: `fused-attn doctor`, `verify`, `compare` and `bench`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fused_attn.backends import get_backend, verdicts, wanted_backend
from fused_attn.tools import bench, ceilings, doctor, plots, sources, verify
from fused_attn.tools.arguments import TOOL, USAGE, parser
from fused_attn.tools.cases import Shape, make_mask
from fused_attn.tools.compare import compare
from fused_attn.tools.comparison import COLUMNS
from fused_attn.tools.plan import plan
from fused_attn.tools.terminal import notice, progress, show_table

# USAGE is 2. The last two are the exit statuses that a shell reports for SIGINT and SIGPIPE.
OK, FAILED, INTERRUPTED, BROKEN_PIPE = 0, 1, 130, 141
SNIPPETS = 3  # maximum number of wrong results that `verify` prints


def _doctor(options: argparse.Namespace) -> int:
    facts = doctor.diagnose(options.backend)
    status = OK if facts["ok"] else FAILED
    if _write_json(options.json, facts):
        return status
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
        print(_one_line(problem))
    failed = sum(not check["ok"] for check in checks)
    print(f"{failed} of {len(checks)} checks FAILED" if failed else _checked(facts))
    return status


def _checked(facts: dict[str, Any]) -> str:
    """Return a line that lists the backends that passed and those that were not checked."""
    checked = dict.fromkeys(f"{c['backend']} on {c['device']}" for c in facts["self_check"])
    names = {check["backend"] for check in facts["self_check"]}
    rest = [entry["name"] for entry in facts["backends"] if entry["name"] not in names]
    return f"right: {', '.join(checked)}; not checked: {', '.join(rest) or 'none'}"


def _machine_rows(machine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    forced = machine["FUSED_ATTN_CPU_ISA"]
    yield "CPU", machine["cpu"]
    yield "instruction set in use", machine["isa"]
    yield "FUSED_ATTN_CPU_ISA", forced or "not set: the best that was built and is there"
    yield "threads", str(machine["threads"])
    for gpu in machine["gpus"]:
        yield "GPU", f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}"
    if not machine["gpus"]:
        yield "GPU", "torch sees none"
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


def _verify(options: argparse.Namespace) -> int:
    names = options.backend or verify.candidates()
    if options.forget:
        removed = [str(path) for path in verdicts.forget(names)]
        if not _write_json(options.json, {"removed": removed}):
            print("\n".join(f"removed {path}" for path in removed) or "nothing was stored")
        return OK
    if options.backend is None:  # skip backends that cannot run; if none can, verify() raises
        names = [name for name in names if not verify.against(name)] or names
    reports: dict[str, verify.Report] = {}
    about = {"versions": doctor.versions(), "machine": doctor.machine()}
    for name in names:
        check_plan = plan(options.quick, graphs=verify.device_of(name).type == "cuda")
        with progress(f"verifying {name}", check_plan.steps) as advance:

            def advanced(report: verify.Report, advance: Any = advance) -> None:
                advance()
                reports[report.backend] = report
                if options.json not in (None, Path("-")):  # an interrupted run keeps its results
                    _write_json(options.json, about | _as_facts(reports))

            reports[name] = verify.verify(name, check_plan, advanced)
    if not _write_json(options.json, about | _as_facts(reports)):
        for report in reports.values():
            _show_verdict(report)
    for report in reports.values():
        if report.not_stored:
            raise OSError(f"the verdict on {report.backend} is not stored: {report.not_stored}")
    return OK if not any(report.wrong for report in reports.values()) else FAILED


def _as_facts(reports: dict[str, verify.Report]) -> dict[str, Any]:
    return {"backends": {name: report.to_dict() for name, report in reports.items()}}


def _show_verdict(report: verify.Report) -> None:
    counts, where = report.counts(), f"{report.backend} on {report.identity['gpu']}"
    show_table(
        f"Checks of {where}", ("type", "what", ">right", ">WRONG", ">not taken"), counts,
        bad=[i for i, row in enumerate(counts) if row[3] not in ("", "0")],
    )  # fmt: skip
    for title, features in (
        ("attention", (*verdicts.KINDS, *verdicts.OPTIONS)), ("norms", verdicts.NORM_FEATURES),
    ):  # fmt: skip
        if rows := report.speedups(title == "norms"):
            show_table(
                f"Times as fast as torch, {title}: {where}; in brackets: not enough to be chosen",
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
        print(f"chosen from now on for {usable} of {len(report.classes)} classes")
        print(f"stored in {report.path}")
    if wanted is not None:
        print(f"but FUSED_ATTN_BACKEND={wanted} decides, as long as it is set")


def _compare(options: argparse.Namespace) -> int:
    if options.png:
        plots.require()
    device = _device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    source = sources.load(options.source, options.batch, options.seqlen, options.seed)
    source = source.to(device, dtype)
    backward = not options.no_backward
    report = compare(
        source.model, *source.args,
        backward=backward, remove_padding=not options.keep_padding, enable=options.enable,
        **source.kwargs,
    )  # fmt: skip
    report.notes[:0] = source.notes
    if options.png:
        plots.plot_comparison(report, options.png)
    about = {"source": options.source, "seed": options.seed, "versions": doctor.versions()}
    if not _write_json(options.json, about | report.to_dict()):
        rows = report.shown_rows(options.parameters)
        print(report.verdict())
        show_table(
            report.title(), COLUMNS, [row.cells() for row in rows],
            bad=[i for i, row in enumerate(rows) if row.above],
        )  # fmt: skip
        print(*report.remarks(), sep="\n")
    return OK if report.ok else FAILED


def _bench(options: argparse.Namespace) -> int:
    if options.png:
        plots.require()
    device = _device(options.device)
    shapes = options.shape or [Shape.parse("2,8,512,512,64")]
    dtypes = options.dtype or ["float32"]
    cases = [
        (shape, mask, dtype, backward)
        for shape in shapes
        for mask in options.mask or ["none", "causal", "padding"]
        for dtype in dtypes
        for backward in ([False, True] if options.backward else [False])
    ]
    for shape, mask, dtype, _ in cases:  # reject what is invalid before any measurement
        bench.require_memory(shape, mask, dtype, device, options.bias)
        make_mask(mask, shape)
    with _threads(options.threads):
        machine = doctor.machine()
        on_cpu = device.type == "cpu" and not get_backend("cpp").unavailable()
        limits = ceilings.cpu_ceilings() if on_cpu else None
        with progress("measuring", len(cases) * options.repeats) as advance:
            results = []
            for i, (shape, mask, dtype, backward) in enumerate(cases, 1):
                case = f"{shape} {mask} {dtype} {'backward' if backward else 'forward'}"
                with notice(f"{TOOL} bench: {case}, {i} of {len(cases)}, takes a while"):
                    result = bench.measure(
                        shape, mask, dtype, backward=backward, dropout_p=options.dropout,
                        bias=options.bias, device=device, backend=options.backend,
                        rounds=options.repeats, limits=limits, advance=advance,
                    )  # fmt: skip
                results.append(result)
    if options.png:
        plots.plot_bench(results, options.png)
    ok = all(result.ok for result in results)
    facts = {
        "ok": ok,
        "versions": doctor.versions(),
        "machine": machine,
        "device": str(device),
        "repeats": options.repeats,
        "dropout": options.dropout,
        "bias": options.bias,
        "ceilings": limits,
        "results": [dataclasses.asdict(result) for result in results],
    }
    if not _write_json(options.json, facts):
        where = str(device) if device.type == "cuda" else f"threads: {machine['threads']}"
        where += f"; dropout {options.dropout:g}" if options.dropout else ""
        where += "; a bias with gradient" if options.bias else ""
        show_table(
            f"Milliseconds ({where}; medians of {options.repeats} rounds)",
            ("shape", "mask", ">visible", "type", "pass", "backend", ">fused_attn", ">SDPA",
             ">speed-up", ">of ceiling", ""),
            [_bench_row(result) for result in results],
            bad=[i for i, result in enumerate(results) if not result.ok],
        )  # fmt: skip
        if limits is not None:
            print(f"ceilings: {ceilings.format_ceilings(limits)}")
        print("all within the numerics contract" if ok else "NOT within the numerics contract")
    return OK if ok else FAILED


def _bench_row(result: bench.Result) -> tuple[str, ...]:
    times = [
        f"{result.milliseconds[name]:.4g}" if name in result.milliseconds else "-"
        for name in (bench.OURS, bench.PEER)
    ]
    speedup = "-" if result.speedup is None else f"{result.speedup:.2f}"
    share = "-" if result.share is None else f"{result.share:.0%}"
    note = result.note
    if not result.ok:
        note += f"; {result.worst} is {result.error:.2e} off, {result.limit:.2e} allowed"
    return (
        result.shape, result.mask, f"{result.visible:.0%}", result.dtype, result.direction,
        result.backend, *times, speedup, share, _one_line(note),
    )  # fmt: skip


# ---- helpers ------------------------------------------------------------------------------------


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        elif not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU: torch sees none")
    return device


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_json(path: Path | None, facts: dict[str, Any]) -> bool:
    """Write facts as JSON to `path`, if it is not None. Return True if `path` is stdout.

    After True, the caller must not print anything else to stdout. Non-finite floats, which JSON
    cannot represent, are written as strings.
    """
    if path is None:
        return False
    text = json.dumps(_strict(facts), indent=1)
    if path == Path("-"):
        print(text)
        return True
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        path.write_text(text + "\n")
        return False
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)  # a reader, or a process that is killed, never leaves half a file
    return False


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _one_line(message: object) -> str:
    """Return a message on one line. Exceptions other than argument errors get a type prefix."""
    text = " ".join(str(message).split())
    if isinstance(message, (ValueError, NotImplementedError)) and text:
        return text
    return f"{type(message).__name__}: {text}" if isinstance(message, Exception) else text


_COMMANDS = {"doctor": _doctor, "verify": _verify, "compare": _compare, "bench": _bench}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fused-attn` command line.

    Args:
        argv: command-line arguments; None for those of the process.

    Returns:
        The exit status: 0 on success, 1 if the numerics contract is violated, 2 for errors.

    Raises:
        SystemExit: the arguments are invalid or request help.

    Example:
        >>> main(["bench", "--shape", "2,8,512,512,64", "--mask", "causal+padding"])
    """
    options = parser().parse_args(argv)
    try:
        status = _COMMANDS[options.command](options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # As in `fused-attn doctor | head`. Redirect stdout, so that the flush at exit succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        print(f"{TOOL} {options.command}: error: {_one_line(error)}", file=sys.stderr)
        return USAGE
    return status
