"""Command line `fused-attn`; each module of fused_attn/tools/commands/ is one command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from fused_attn.tools.arguments import USAGE, one_line
from fused_attn.tools.commands import bench, compare, doctor, verify
from fused_attn.version import __version__

TOOL = "fused-attn"
INTERRUPTED, BROKEN_PIPE = 130, 141  # the exit statuses that a shell reports for SIGINT and SIGPIPE
COMMANDS = {"doctor": doctor, "verify": verify, "compare": compare, "bench": bench}
_STATUSES = """exit status:
  0  all results are within the numerics contract
  1  a check failed
  2  invalid arguments or another error; one line on stderr states the reason"""


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints an error as one line on stderr and exits with status USAGE."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Parsing stores the command's name in `command`."""
    parser = _Parser(
        prog=TOOL,
        description="Fused masked attention and norms: check the installation, compare the results "
        "of a model with those of eager attention, and measure the speed.",
        epilog=_examples("doctor", "compare ./my-bert", "bench --mask causal,padding"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        examples = _examples(*(f"{name} {example}".rstrip() for example in module.EXAMPLES))
        command = commands.add_parser(
            name, help=module.HELP, description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=f"{examples}\n\n{_STATUSES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument("--traceback", action="store_true", help="print tracebacks of errors")
        module.add_arguments(command)
    return parser


def _examples(*arguments: str) -> str:
    return "\n".join(["examples:", *(f"  {TOOL} {a}" for a in arguments)])


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
        status = COMMANDS[options.command].run(options)
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
        print(f"{TOOL} {options.command}: error: {one_line(error)}", file=sys.stderr)
        return USAGE
    return status
