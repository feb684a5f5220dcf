"""Tables and progress bars, drawn by rich on a terminal if it is installed, else in plain text."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO

NOTICE_SECONDS = 5.0


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
        bad: indices of the rows to print in red if the output supports colours.
    """
    if not _decorated(sys.stdout):
        print(title, aligned(columns, rows), "", sep="\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for name in columns:
        number = name.startswith(">")
        justify: Any = "right" if number else "left"
        header = Text(name.removeprefix(">"))
        table.add_column(header, justify=justify, no_wrap=number, overflow="fold")
    for i, row in enumerate(rows):
        # Wrapped in Text, because rich would parse "input[0]" as markup.
        table.add_row(*map(Text, row), style="bold red" if i in bad else None)
    Console(file=sys.stdout).print(table)


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; yield a function that advances it by one of `total` steps.

    The bar is drawn only in these calls, because a refresh thread would disturb measurements.
    """
    if not _decorated(sys.stderr):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    with Progress(console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(description, total=total)
        bar.refresh()

        def advance() -> None:
            bar.update(task, advance=1, refresh=True)

        yield advance


@contextlib.contextmanager
def notice(text: str) -> Iterator[None]:
    """Print a line to stderr if the block takes longer than NOTICE_SECONDS."""
    timer = threading.Timer(NOTICE_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _decorated(stream: TextIO) -> bool:
    return stream.isatty() and importlib.util.find_spec("rich") is not None
