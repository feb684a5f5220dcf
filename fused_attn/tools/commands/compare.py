"""The command `fused-attn compare`."""

from __future__ import annotations

import argparse

import torch

from fused_attn.tools import doctor, plots, sources
from fused_attn.tools.arguments import (
    FAILED,
    OK,
    add_device,
    add_json,
    add_png,
    positive,
    use_device,
    write_json,
)
from fused_attn.tools.cases import DTYPES
from fused_attn.tools.compare import compare
from fused_attn.tools.comparison import COLUMNS
from fused_attn.tools.recording import copied
from fused_attn.tools.terminal import show_table

HELP = "compare the errors of a model with fused_attn and with eager attention"
EXAMPLES = (
    "./my-bert",
    "./my-bert --dtype bfloat16 --batch 4 --seqlen 128",
    "my_project.models:example --json report.json --png report.png",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument(
        "source", metavar="SOURCE",
        help="a folder with a Hugging Face config.json (inputs are random, as are the weights if "
        "the folder contains none); or module:function, importable from this directory, that "
        "returns (model, args) or (model, args, kwargs)",
    )  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="default: the dtype of the model")
    command.add_argument(
        "--batch", type=positive, help=f"batch size, for a folder; default {sources.DEFAULT_BATCH}"
    )
    command.add_argument(
        "--seqlen", type=positive, help=f"length, for a folder; default {sources.DEFAULT_SEQLEN}"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of random inputs and weights")
    command.add_argument("--no-backward", action="store_true", help="do not compare gradients")
    command.add_argument(
        "--enable", action="store_true",
        help="also fuse calls of scaled_dot_product_attention with enable(), and count them",
    )  # fmt: skip
    command.add_argument(
        "--parameters", action="store_true",
        help="list all gradients; default: only the one closest to its limit in each module",
    )  # fmt: skip
    command.add_argument(
        "--keep-padding", action="store_true",
        help="keep the original values of padded rows: swap_modules(model, remove_padding=False); "
        "without it, stacks of encoder layers return 0 there, which counts as an error if the "
        "model returns these rows",
    )  # fmt: skip
    add_device(command)
    add_json(command)
    add_png(command)


def run(options: argparse.Namespace) -> int:
    """Compare a model; return the exit status."""
    if options.png:
        plots.require()
    device = use_device(options.device)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    source = sources.load(options.source, options.batch, options.seqlen, options.seed)
    args, kwargs = copied((source.args, source.kwargs), dtype, device)
    report = compare(
        source.model.to(device, dtype), *args, backward=not options.no_backward,
        remove_padding=not options.keep_padding, enable=options.enable, **kwargs,
    )  # fmt: skip
    report.notes[:0] = source.notes
    if options.png:
        plots.plot_comparison(report, options.png)
    about = {"source": options.source, "seed": options.seed, "versions": doctor.versions()}
    if not write_json(options.json, about | report.to_dict()):
        rows = report.shown_rows(options.parameters)
        print(report.verdict())
        show_table(
            report.title(), COLUMNS, [row.cells() for row in rows],
            bad=[i for i, row in enumerate(rows) if row.above],
        )  # fmt: skip
        print(*report.remarks(), sep="\n")
    return OK if report.ok else FAILED
