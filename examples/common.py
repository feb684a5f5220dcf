"""Code shared by the examples: command line, claims, plots and JSON records."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["MPLBACKEND"] = "Agg"
try:
    import matplotlib.pyplot as plt
    import torch
    from terminal import IS_FIRST, console

    import fused_attn
    from fused_attn.backends import wanted_backend
    from fused_attn.tools import doctor

    for _module in ("sacrebleu", "safetensors", "tokenizers"):
        if importlib.util.find_spec(_module) is None:
            raise ImportError(f"No module named {_module!r}")
except ImportError as error:
    sys.exit(
        f"{Path(sys.argv[0]).stem}: {error}; run `make env`, which installs what examples need"
    )


@dataclass
class Example:
    """Run of an example, with its options and results.

    Attributes:
        name: name of the example.
        smoke: use little data and few steps.
        seed: seed of all random numbers.
        output: folder for the plots and the JSON record.
        backend: backend of all calls, see `fused_attn.use_backend`.
        flags: options of this example only. For example, shared=True adds --shared and
            --no-shared.
        figures: recorded results.
        shown: findings and claims in printed order. A claim has "holds", its outcome.
    """

    name: str
    smoke: bool
    seed: int
    output: Path
    backend: str
    flags: dict[str, bool] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def require(self, holds: bool, claim: str) -> None:
        """Check and print a claim; if it is false, the exit status is 1. No effect with --smoke."""
        if not self.smoke:
            console.print(f"{'Holds' if holds else 'FAILED'}: {claim}", soft_wrap=True)
            self.shown.append({"holds": bool(holds), "text": claim})

    def report(self, finding: str) -> None:
        """Print a finding, and record it along with the claims."""
        console.print(finding, soft_wrap=True)
        self.shown.append({"text": finding})

    @contextlib.contextmanager
    def figure(self, name: str, *shape: int, size: tuple[float, float]) -> Iterator[Any]:
        """Yield the axes of a plot, and write the plot to a PNG file at the end of the block.

        Args:
            name: name of the plot. The file is <example>_<name>.png.
            shape: number of rows and columns of axes.
            size: width and height in inches.
        """
        canvas, axes = plt.subplots(*shape, figsize=size, layout="constrained")
        yield axes
        path = self.output / f"{self.name}_{name}.png"
        canvas.savefig(path, dpi=100, metadata={"Software": None})  # equal data, equal files
        plt.close(canvas)
        console.print(f"Plot: {path}", soft_wrap=True)

    def record(self) -> None:
        """Write the figures as JSON, together with the machine, versions and settings."""
        self.figures["seconds"] = round(time.perf_counter() - self.began, 1)
        results = {
            "example": self.name,
            "smoke": self.smoke,
            "seed": self.seed,
            "backend": self.backend,
            "machine": doctor.machine(),
            "versions": doctor.versions(),
            "shown": self.shown,
            "figures": self.figures,
        }
        path = self.output / f"{self.name}.json"
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
        console.print(f"Figures: {path} ({self.figures['seconds']:.0f} seconds)", soft_wrap=True)


@contextlib.contextmanager
def example(name: str, doc: str | None, **flags: bool) -> Iterator[Example]:
    """Parse the command line, including `flags`; run the block; then write its JSON record.

    The block runs on the selected backend. If a claim failed, the process exits with status 1. If
    torchrun started several processes, all run the block, but only the first prints and records.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="little data, few steps: does it run?")
    best = next(row["name"] for row in doctor.backends() if row["available"])
    parser.add_argument(
        "--backend", choices=fused_attn.available_backends(), default=wanted_backend() or best,
        help="eager is the reference; %(default)s without",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of the results; without, demo_output")
    for flag, default in flags.items():
        option = f"--{flag.replace('_', '-')}"
        parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
    args = vars(parser.parse_args())
    run = Example(name, flags={flag: args.pop(flag) for flag in flags}, **args)
    run.output = run.output or Path("demo_output", "smoke" if run.smoke else "")
    try:
        run.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run.output).close()  # detect a read-only folder before training
    except OSError as error:
        parser.error(f"argument --output: {error}")
    torch.manual_seed(run.seed)
    with fused_attn.use_backend(run.backend):
        yield run
    if IS_FIRST:
        run.record()
    if failed := [shown["text"] for shown in run.shown if not shown.get("holds", True)]:
        sys.exit(f"{name}: {'; '.join(failed)}")
