"""Plain-text tables and a progress line; on a terminal, rows with errors are red."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

_RED, _RESET, _CLEAR = "\x1b[1;31m", "\x1b[0m", "\r\x1b[K"


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as plain text.

    Args:
        columns: column names. A column whose name begins with ">" is aligned to the right.
        rows: one cell per column.
    """
    lines = [[name.removeprefix(">") for name in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    signs = [">" if name.startswith(">") else "<" for name in columns]
    template = "  ".join(f"{{:{sign}{w}}}" for sign, w in zip(signs, widths, strict=True))
    return "\n".join(template.format(*line).rstrip() for line in lines)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    bad: Collection[int] = (),
) -> None:
    """Print a table followed by an empty line.

    Args:
        title, columns, rows: see `aligned`.
        bad: indices of the rows to print in red on a terminal.
    """
    lines = aligned(columns, rows).split("\n")
    for i in bad if sys.stdout.isatty() else ():
        lines[i + 1] = f"{_RED}{lines[i + 1]}{_RESET}"
    print(title, *lines, "", sep="\n")


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Count steps in a line on stderr, if that is a terminal.

    Yields a function that counts one of `total` steps. The line is written only in these calls,
    because a thread would disturb measurements.
    """
    done = -1

    def advance() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            line = f"{_CLEAR}{description}: {done} of {total}"
            print(line, end="", file=sys.stderr, flush=True)

    advance()
    try:
        yield advance
    finally:
        if sys.stderr.isatty():
            print(_CLEAR, end="", file=sys.stderr, flush=True)
