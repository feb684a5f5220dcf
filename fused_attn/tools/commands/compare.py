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

HELP = "the numerics of your model, fused against eager attention"
EXAMPLES = (
    "./my-bert",
    "./my-bert --dtype bfloat16 --batch 4 --seqlen 128",
    "my_project.models:example --json report.json --png report.png",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument(
        "source", metavar="SOURCE",
        help="a folder with a Hugging Face config.json (and weights, or they are random), whose "
        "inputs will be random; or module:function, importable from here, that returns (model, "
        "args) or (model, args, kwargs)",
    )  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="default: that of the model")
    command.add_argument(
        "--batch", type=positive, help=f"of a folder's inputs; default {sources.DEFAULT_BATCH}"
    )
    command.add_argument(
        "--seqlen", type=positive, help=f"of a folder's text; default {sources.DEFAULT_SEQLEN}"
    )
    command.add_argument("--seed", type=int, default=0, help="of inputs and random weights")
    command.add_argument("--no-backward", action="store_true", help="compare no gradients")
    command.add_argument(
        "--enable", action="store_true",
        help="under enable() too: calls of torch's scaled_dot_product_attention, which are counted",
    )  # fmt: skip
    command.add_argument(
        "--parameters", action="store_true",
        help="the gradient of each parameter; default: of each module the one nearest its limit",
    )  # fmt: skip
    command.add_argument(
        "--keep-padding", action="store_true",
        help="padded rows as in the original, see swap_modules(model, remove_padding=False); "
        "without it stacks of encoder layers return 0 there, which counts if the model returns "
        "these rows",
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
