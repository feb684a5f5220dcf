"""Command-line arguments and help of `fused-attn`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fused_attn.backends.registry import BACKENDS
from fused_attn.tools import plan, sources
from fused_attn.tools.cases import DTYPES, MASKS, Shape
from fused_attn.version import __version__

TOOL = "fused-attn"
USAGE = 2  # exit status of errors
_STATUSES = """exit status:
  0  the numerics contract holds
  1  it does not
  2  the command or the model is wrong; one line on stderr says why"""


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints an error as one line on stderr and exits with status USAGE."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Parsing stores the command's name in `command`."""
    parser = _Parser(
        prog=TOOL,
        description="Fused masked attention and norms: is it installed right, does it compute the "
        "same as eager attention in your model, and how fast is it?",
        epilog=_examples("doctor", "compare ./my-bert", "bench --mask causal,padding"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, what: str, *examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"{_examples(*(f'{name} {e}'.rstrip() for e in examples))}\n\n{_STATUSES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument("--traceback", action="store_true", help="show where an error is from")
        return command

    _add_doctor(add)
    _add_verify(add)
    _add_compare(add)
    _add_bench(add)
    return parser


def _add_doctor(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "doctor", "versions, CPU, GPU, backends with why not, and a self-check of a second",
        "", "--json", "--backend triton",
    )  # fmt: skip
    command.add_argument(
        "--json", type=_output, nargs="?", const=Path("-"), metavar="FILE",
        help="write JSON to a file, or to stdout instead of the tables",
    )  # fmt: skip
    _add_backend(command, "check this backend, instead of those that are chosen unasked")


def _add_verify(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "verify", "are the GPU kernels right on this machine, and where are they faster? They are "
        "chosen there from then on",
        "", "--quick", "--backend triton --json verdict.json", "--forget",
    )  # fmt: skip
    command.add_argument(
        "--backend", choices=list(BACKENDS), nargs="+", metavar="BACKEND",
        help=f"of {', '.join(BACKENDS)}; default: those that need it and can run here",
    )  # fmt: skip
    command.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(plan.QUICK_DTYPES)}, and head_dim "
        f"up to {' and '.join(map(str, plan.QUICK_WIDTHS))}",
    )  # fmt: skip
    command.add_argument(
        "--forget",
        action="store_true",
        help="remove what is stored, of all machines",
    )
    command.add_argument(
        "--json", type=_output, metavar="FILE", help="write JSON; - for stdout, without the tables"
    )


def _add_compare(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "compare", "the numerics of your model, fused against eager attention",
        "./my-bert", "./my-bert --dtype bfloat16 --batch 4 --seqlen 128",
        "my_project.models:example --json report.json --png report.png",
    )  # fmt: skip
    command.add_argument(
        "source", metavar="SOURCE",
        help="a folder with a Hugging Face config.json (and weights, or they are random), whose "
        "inputs will be random; or module:function, importable from here, that returns (model, "
        "args) or (model, args, kwargs)",
    )  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="default: that of the model")
    command.add_argument(
        "--batch", type=_positive, help=f"of a folder's inputs; default {sources.DEFAULT_BATCH}"
    )
    command.add_argument(
        "--seqlen", type=_positive, help=f"of a folder's text; default {sources.DEFAULT_SEQLEN}"
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
    _add_device(command)
    _add_files(command)


def _add_bench(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "bench", "attention timed against torch's scaled_dot_product_attention",
        "", "--shape 2,8,512,512,64 8,12,128,128,64 --mask none,causal,causal+padding",
        "--shape 1,32/8,1024,1024,128 --mask window:128 --dtype float32,bfloat16 --backward",
        "--mask padding --bias --dropout 0.1 --backward",
        "--device cuda --backend triton --dtype bfloat16 --json out.json --png out.png",
    )  # fmt: skip
    described = [f"  {name:21}{kind.what}" for name, kind in MASKS.items()]
    command.epilog = "\n".join(["masks:", *described, "", command.epilog or ""])
    command.add_argument(
        "--shape", type=_shape, nargs="+", action="extend",
        metavar="B,H,LQ,LK,D", help="batch, heads (or heads/heads of keys), lengths of queries and "
        "keys, head_dim; default 2,8,512,512,64",
    )  # fmt: skip
    command.add_argument(
        "--mask", type=_listed, action="extend", metavar="MASK,...",
        help="none, or names of masks (below) joined by +; default none,causal,padding",
    )  # fmt: skip
    command.add_argument(
        "--dtype", type=_dtypes, action="extend", metavar="DTYPE,...",
        help=f"of {', '.join(DTYPES)}; default float32",
    )  # fmt: skip
    command.add_argument("--backward", action="store_true", help="the backward pass, too")
    command.add_argument(
        "--dropout", type=_probability, default=0.0, metavar="P",
        help="of the timed calls; the check is without",
    )  # fmt: skip
    command.add_argument(
        "--bias", action="store_true", help="add a float tensor to the scores, with its gradient"
    )
    command.add_argument("--threads", type=_positive, help="of the CPU; default: torch's")
    command.add_argument("--repeats", type=_positive, default=20, help="rounds; default 20")
    _add_backend(command, "instead of the automatic choice")
    _add_device(command)
    _add_files(command)


def _add_backend(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--backend", choices=list(BACKENDS), help=what)


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", type=_device, default="cpu", help="cpu (the default), cuda, cuda:1, ..."
    )


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", type=_output, metavar="FILE", help="write JSON; - for stdout, without the table"
    )
    command.add_argument("--png", type=_output, metavar="FILE", help="write a plot (matplotlib)")


def _examples(*arguments: str) -> str:
    return "\n".join(["examples:", *(f"  {TOOL} {a}" for a in arguments)])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _probability(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text!r}")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


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
            raise argparse.ArgumentTypeError(f"must be of {', '.join(DTYPES)}, got {name!r}")
    return _listed(text)


def _output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text!r}")
    return path
