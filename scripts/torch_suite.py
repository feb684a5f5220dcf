"""Run PyTorch's tests of attention, norms and Transformers with fused_attn in torch's place.

    python scripts/torch_suite.py --pytorch /path/to/pytorch

The script runs the tests on plain torch and with fused_attn, and compares the outcomes.
docs/compatibility.md lists each difference with its reason. The exit status is 1 if a difference
is not listed, or if a listed one is not found, unless its reason begins with "On some CPUs".
/path/to/pytorch is a checkout, or a folder with the files in `FILES`, of a version close to that of
the installed torch. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pages
import torch
from torch_in_place import SWAPS, read_outcomes

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
PAGE = ROOT / "docs" / "compatibility.md"
# PyTorch's test files, and the pattern that selects tests by name.
FILES = {
    "test/test_transformers.py": "",
    "test/nn/test_multihead_attention.py": "",
    "test/test_nn.py": "(?i)layer_?norm|rms_?norm|transformer|multi_?head|attention|sdpa",
}
# pytest's exit statuses of complete runs: all passed, some failed, nothing to run.
_ENDED = (0, 1, 5)
_HEAD = ("| in torch's place | tests | number | reason |", "|---|---|---|---|")

Outcomes = dict[str, dict[str, Any]]  # keys: test names, see torch_in_place


@dataclass
class Listed:
    """Row of the page: tests whose outcomes differ, and the reason."""

    swaps: str
    patterns: str
    reason: str
    found: set[tuple[str, str]] = field(default_factory=set)  # (swap, test) that differ

    @property
    def everywhere(self) -> bool:
        return not self.reason.startswith("On some CPUs")

    def covers(self, swap: str, test: str) -> bool:
        patterns = re.findall("`([^`]+)`", self.patterns)
        return swap in self.swaps.split(", ") and any(fnmatchcase(test, p) for p in patterns)

    def __str__(self) -> str:
        return f"| {self.swaps} | {self.patterns} | {len(self.found)} | {self.reason} |"


def main() -> int:
    arguments = _arguments()
    if find_spec("expecttest") is None:
        raise SystemExit("torch.testing._internal imports expecttest: pip install expecttest")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = {s: _run(arguments.pytorch, s, folder, arguments.most) for s in SWAPS}
    plain = outcomes.pop("torch")
    page = arguments.page.read_text("utf-8")
    rows = _listed(page)
    unlisted = [line for swap in outcomes for line in _unlisted(swap, plain, outcomes[swap], rows)]
    stale = [f"{row}: no such test differs" for row in rows if row.everywhere and not row.found]
    counts = _counts(plain, outcomes)
    print(counts, *rows, "", *unlisted, *stale, sep="\n")
    if arguments.write:
        page = pages.replaced(page, "counts", counts)
        page = pages.replaced(page, "differences", "\n".join((*_HEAD, *map(str, rows))))
        arguments.page.write_text(page, "utf-8")
    print(f"{len(unlisted)} differences that are not listed, {len(stale)} rows that are not found")
    return 1 if unlisted or stale else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pytorch", type=_path, required=True, help="a checkout of PyTorch")
    parser.add_argument(
        "--most",
        type=int,
        default=64,
        help="maximum parameter sets per test (64); 0 for all",
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="page that lists the differences")
    parser.add_argument("--write", action="store_true", help="write the numbers to the page")
    parser.add_argument(
        "--results",
        type=_path,
        help="folder for outcomes, which are reused",
    )
    arguments = parser.parse_args()
    if missing := [file for file in FILES if not (arguments.pytorch / file).is_file()]:
        parser.error(f"--pytorch {arguments.pytorch} has no {', '.join(missing)}")
    return arguments


def _path(name: str) -> Path:
    return Path(name).resolve()


def _run(pytorch: Path, swap: str, folder: Path, most: int) -> Outcomes:
    """Return the outcomes of the tests of all files; each file runs in a separate process."""
    outcomes: Outcomes = {}
    # An empty file, so that pytest ignores PyTorch's settings.
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n")
    for file, about in FILES.items():
        path = folder / f"{swap}-{Path(file).stem}.jsonl"
        command = [
            sys.executable, "-m", "pytest", str(pytorch / file),
            "-q", "-rN", "--tb=no", "--no-header", "--disable-warnings",
            f"--rootdir={pytorch}", "-c", str(settings), "--noconftest", "-p", "no:cacheprovider",
            "-p", "torch_in_place", f"--swap={swap}", f"--outcomes={path}",
            f"--about={about}", f"--most={most}",
        ]  # fmt: skip
        print(f"{file}, {swap}", flush=True)
        while True:
            before = len(read_outcomes(path))
            status = subprocess.run(command, env=_environment(), cwd=folder).returncode
            if status in _ENDED:
                break
            # A test that ends the process has crashed; the next process continues after it.
            if status > 0 or len(read_outcomes(path)) == before:
                raise SystemExit(f"{file}, {swap}: pytest ended with status {status}")
        outcomes |= read_outcomes(path)
    return outcomes


def _environment() -> dict[str, str]:
    """Return the environment variables for PyTorch's tests, which run on the CPU only."""
    paths = [str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def _listed(page: str) -> list[Listed]:
    """Return the rows of the page's table of differences."""
    rows = []
    for line in pages.parts(page, "differences")[1].splitlines()[len(_HEAD) :]:
        swaps, patterns, _, reason = (cell.strip() for cell in line.strip("| ").split(" | "))
        rows.append(Listed(swaps, patterns, reason))
    return rows


def _unlisted(swap: str, plain: Outcomes, ours: Outcomes, rows: list[Listed]) -> list[str]:
    """Return the differences that no row covers; rows record those that they cover."""
    lines = []
    for test in _differing(plain, ours):
        covering = [row for row in rows if row.covers(swap, test)]
        for row in covering:
            row.found.add((swap, test))
        if not covering:
            before, after = (_outcome(outcomes, test) for outcomes in (plain, ours))
            why = (ours.get(test, {}).get("why") or "").splitlines()
            lines.append(f"{swap}: {test}: {before} -> {after}: {' '.join(_errors(why))}")
    return lines


def _errors(why: list[str]) -> list[str]:
    """Return the lines of a pytest report that contain the error message."""
    return [line[1:].strip() for line in why if line.startswith("E ")][:3] or why[-1:]


def _differing(plain: Outcomes, ours: Outcomes) -> list[str]:
    tests = sorted(plain.keys() | ours.keys())
    return [test for test in tests if _outcome(plain, test) != _outcome(ours, test)]


def _outcome(outcomes: Outcomes, test: str) -> str:
    return outcomes[test]["outcome"] if test in outcomes else "not there"


def _counts(plain: Outcomes, swaps: dict[str, Outcomes]) -> str:
    """Return the table with the numbers of tests by outcome."""

    def row(title: str, count: Any) -> str:
        return f"| {title} | " + " | ".join(str(count(ours)) for ours in swaps.values()) + " |"

    def both(ours: Outcomes, outcome: str) -> list[str]:
        return [t for t in plain if _outcome(plain, t) == outcome == _outcome(ours, t)]

    return "\n".join((
        f"torch {torch.__version__}, {len(plain)} tests:",
        "",
        "| in torch's place | " + " | ".join(swaps) + " |",
        "|---|" + "---|" * len(swaps),
        row("pass on both", lambda ours: len(both(ours, "passed"))),
        row(
            "of these, on kernels of ours",
            lambda ours: sum(ours[t]["on_kernels"] for t in both(ours, "passed")),
        ),
        row("fail on both", lambda ours: len(both(ours, "failed"))),
        row("skipped on both", lambda ours: len(both(ours, "skipped"))),
        row("differ", lambda ours: len(_differing(plain, ours))),
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
