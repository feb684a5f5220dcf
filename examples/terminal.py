"""Terminal output of the examples: text, tables and progress bars."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

IS_FIRST = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, if any
TERMINAL = sys.stdout.isatty()
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # for terminals that cannot encode Korean
console = Console(
    width=None if TERMINAL else 100, highlight=False, markup=False, quiet=not IS_FIRST
)


def progress(
    items: Sequence[Any], title: str, losses: Callable[[], list[float]] = list
) -> Iterator[Any]:
    """Yield items. On a terminal, show a progress bar; else, print up to ten lines with losses."""
    begin = time.perf_counter()
    with Progress(console=console, disable=not TERMINAL, transient=True) as bar:
        task = bar.add_task(title, total=len(items))
        for i, item in enumerate(items, 1):
            yield item
            told = "".join(f", loss {loss:.4f}" for loss in losses())
            bar.update(task, advance=1, description=title + told)
            if told and not TERMINAL and i * 10 // len(items) > (i - 1) * 10 // len(items):
                told += f", {time.perf_counter() - begin:.0f} s"
                console.print(f"{title}: step {i} of {len(items)}{told}")


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table with a title."""
    drawn = Table(*header, box=box.SIMPLE_HEAD if TERMINAL else box.ASCII2, show_edge=False)
    for row in rows:
        drawn.add_row(*map(str, row))
    console.print(f"\n{title}", drawn, sep="\n")
