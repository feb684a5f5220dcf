"""Run the pytest stages of `make test` one after another and summarize their results.

    python scripts/stages.py [--all] [stage ...]

`make test` skips the tests that are marked `thorough`. `make test-all` passes --all to run them.

All stages run even if earlier ones fail. Ctrl-C stops immediately.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "test-results"  # JUnit XML, with the duration of each test
INTERRUPTED = 2  # pytest's exit status after Ctrl-C


class Stage(NamedTuple):
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


# A process per core, up to four, since each takes 1.6 GB. Those that test kernels use all threads,
# which sleep while they wait; all others use one thread.
_KERNELS = [
    f"tests/ops/test_{n}.py" for n in ("attention", "bias", "decode", "dropout", "norm", "varlen")
]
_PARALLEL = ["-n", "logical", "--maxprocesses", "4", "--dist", "worksteal"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Folders with tests that run on several backends. The stage of those for GPUs collects only these,
# which saves time.
_BACKENDS = [f"tests/{folder}" for folder in ("ops", "backends", "nn", "tools")]
_DISTRIBUTED = "tests/distributed"  # starts four processes, which all its tests share
_NOT_EMULATED = [f"tests/backends/test_cuda_{n}.py" for n in ("compiled", "emulator")]
STAGES = [
    Stage("kernels", [*_KERNELS, *_PARALLEL], {"OMP_WAIT_POLICY": "passive"}),
    Stage(
        "rest",
        [*_PARALLEL, *(f"--ignore={path}" for path in [*_KERNELS, _DISTRIBUTED])],
        _ONE_THREAD,
    ),
    Stage("distributed", [_DISTRIBUTED], _ONE_THREAD),
    Stage(  # one stage, because collecting the tests takes 15 seconds
        "gpu",
        [*_BACKENDS, *_PARALLEL, "-k", "triton or cuda", *map("--ignore={}".format, _NOT_EMULATED)],
        _ONE_THREAD | {"TRITON_INTERPRET": "1", "CUDA_EMULATED": "1"},
    ),
]


def run(stages: Sequence[Stage], folder: Path, thorough: bool = False) -> int:
    """Run the stages, print a summary, and return the exit status: 0 if nothing failed.

    Args:
        folder: folder to which each stage writes its results, as <name>.xml.
        thorough: also run the tests that are marked `thorough`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    rows, failures = [], []
    for number, stage in enumerate(stages, 1):
        print(f"\nStage {number} of {len(stages)}: {stage.name}", flush=True)
        results = folder / f"{stage.name}.xml"
        results.unlink(missing_ok=True)
        # In contrast to xunit2, xunit1 includes the file of each test.
        options = ["-q", "--continue-on-collection-errors", "-o", "junit_family=xunit1"]
        options += [] if thorough else ["-m", "not thorough"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={results}"]
        began = time.perf_counter()
        status = subprocess.run(
            [*command, *stage.arguments], cwd=ROOT, env=os.environ | stage.environment
        ).returncode
        seconds = time.perf_counter() - began
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        counts, failed = read(results)
        if status != 0 and not failed:  # no tests collected, wrong arguments, or a crash
            failed = [f"(pytest exited with status {status})"]
            counts["failed"] += 1
        failures += [f"{stage.name}: {test}" for test in failed]
        total += counts
        rows.append(f"{stage.name:12} {seconds:5.0f} s  {line(counts)}")
    print("", *rows, "", *(f"FAILED {test}" for test in failures), sep="\n")
    print(line(total), flush=True)
    return min(len(failures), 1)


def line(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))


def read(path: Path) -> tuple[Counter[str], list[str]]:
    """Return counts and ids of failed tests from a JUnit XML file; both empty without a file."""
    counts: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(test_id(case))
        else:
            counts["passed" if case.find("skipped") is None else "skipped"] += 1
    return counts, failed


def test_id(case: ElementTree.Element) -> str:
    """Return the pytest id of a test, or the path of a file that could not be collected."""
    name, module, file = (case.get(key, "") for key in ("name", "classname", "file"))
    if not module or not file:
        return file or f"{module}{name}"
    classes = module.removeprefix(file.removesuffix(".py").replace("/", ".")).replace(".", "::")
    return f"{file}{classes}::{name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [stage.name for stage in STAGES]
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(names)}; without, all")
    parser.add_argument("--all", action="store_true", help="also the tests marked thorough")
    options = parser.parse_args()
    chosen = options.stages
    if unknown := set(chosen) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        wanted = [s for s in STAGES if not chosen or s.name in chosen]
        return run(wanted, RESULTS, options.all)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
