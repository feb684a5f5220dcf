"""The command `fused-attn bench`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import torch

from fused_attn.backends import get_backend
from fused_attn.tools import bench, ceilings, doctor, plots
from fused_attn.tools.arguments import (
    FAILED,
    OK,
    add_backend,
    add_device,
    add_json,
    add_png,
    one_line,
    positive,
    use_device,
    write_json,
)
from fused_attn.tools.cases import DTYPES, MASKS, Shape, make_mask
from fused_attn.tools.terminal import progress, show_table

HELP = "compare the speed of attention with torch's scaled_dot_product_attention"
EXAMPLES = (
    "",
    "--shape 2,8,512,512,64 8,12,128,128,64 --mask none,causal,causal+padding",
    "--shape 1,32/8,1024,1024,128 --mask window:128 --dtype float32,bfloat16 --backward",
    "--mask padding --bias --dropout 0.1 --backward",
    "--mask none,causal --packed --shape 16,8,512,512,64",
    "--device cuda --backend triton --dtype bfloat16 --json out.json --png out.png",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and the masks to its help."""
    described = [f"  {name:21}{kind.what}" for name, kind in MASKS.items()]
    command.epilog = "\n".join(["masks:", *described, "", command.epilog or ""])
    command.add_argument(
        "--shape", type=_shape, nargs="+", action="extend",
        metavar="B,H,LQ,LK,D", help="batch, heads (or heads/heads of keys), lengths of queries and "
        "keys, head_dim; default 2,8,512,512,64; the layout is transposed, as in models",
    )  # fmt: skip
    command.add_argument(
        "--mask", type=_listed, action="extend", metavar="MASK,...",
        help="none, or NAME or NAME:SIZE (below) joined by +; default none,causal,padding",
    )  # fmt: skip
    command.add_argument(
        "--dtype", type=_dtypes, action="extend", metavar="DTYPE,...",
        help=f"any of {', '.join(DTYPES)}; default float32",
    )  # fmt: skip
    command.add_argument("--backward", action="store_true", help="also time the backward pass")
    command.add_argument(
        "--dropout", type=_probability, default=0.0, metavar="P",
        help="dropout_p of the timed calls; the checks run without dropout",
    )  # fmt: skip
    command.add_argument(
        "--bias", action="store_true", help="add a float tensor with a gradient to the scores"
    )
    command.add_argument(
        "--packed", action="store_true",
        help="time varlen_attention on sequences with lengths from a quarter of seqlen to seqlen, "
        "and torch on the padded batch",
    )  # fmt: skip
    command.add_argument("--threads", type=positive, help="CPU threads; default: torch's")
    command.add_argument("--repeats", type=positive, default=20, help="timing rounds; default 20")
    add_backend(command, "use this backend instead of the default one")
    add_device(command)
    add_json(command)
    add_png(command)


def _probability(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text!r}")
    return value


def _shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listed(text: str) -> list[str]:
    return text.split(",")


def _dtypes(text: str) -> list[str]:
    for name in _listed(text):
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(DTYPES)}, got {name!r}")
    return _listed(text)


def run(options: argparse.Namespace) -> int:
    """Check and time the cases; return the exit status."""
    if options.png:
        plots.require()
    device = use_device(options.device)
    cases = list(
        itertools.product(
            options.shape or [Shape.parse("2,8,512,512,64")],
            options.mask or ["none", "causal", "padding"],
            options.dtype or ["float32"],
            [False, True] if options.backward else [False],
        )
    )
    for shape, mask, dtype, _ in cases:  # reject invalid cases before any measurement
        bench.require_memory(shape, mask, dtype, device, options.bias)
        make_mask(mask, shape)
    results: list[bench.Result] = []
    with _threads(options.threads):
        machine = doctor.machine()
        on_cpu = device.type == "cpu" and not get_backend("cpp").unavailable()
        limits = ceilings.cpu_ceilings() if on_cpu else None
        for shape, mask, dtype, backward in cases:
            case = f"{shape} {mask} {dtype} {'backward' if backward else 'forward'}"
            case += f", {len(results) + 1} of {len(cases)}"
            with progress(f"measuring {case}", options.repeats) as advance:
                result = bench.measure(
                    shape, mask, dtype, backward=backward, dropout_p=options.dropout,
                    bias=options.bias, packed=options.packed, device=device,
                    backend=options.backend, rounds=options.repeats, limits=limits, advance=advance,
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
        "packed": options.packed,
        "ceilings": limits,
        "results": [dataclasses.asdict(result) for result in results],
    }
    if not write_json(options.json, facts):
        where = str(device) if device.type == "cuda" else f"threads: {machine['threads']}"
        where += f"; dropout {options.dropout:g}" if options.dropout else ""
        where += "; a bias with gradient" if options.bias else ""
        where += "; packed" if options.packed else ""
        show_table(
            f"Milliseconds ({where}; medians of {options.repeats} rounds)",
            ("shape", "mask", ">visible", "type", "pass", "backend", ">fused_attn", ">SDPA",
             ">speedup", ">of ceiling", ""),
            [_row(result) for result in results],
            bad=[i for i, result in enumerate(results) if not result.ok],
        )  # fmt: skip
        if limits is not None:
            print(f"ceilings: {ceilings.format_ceilings(limits)}")
        print("all within the numerics contract" if ok else "NOT within the numerics contract")
    return OK if ok else FAILED


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _row(result: bench.Result) -> tuple[str, ...]:
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
        result.backend, *times, speedup, share, one_line(note),
    )  # fmt: skip
