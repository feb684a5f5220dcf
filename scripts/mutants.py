"""Mutation tests: check that `make test` detects each fault (`make mutants`).

    python scripts/mutants.py [name ...]
    python scripts/mutants.py --source cpu|cuda|triton|masks [--seed 1] [--count 100] [--limit 60]

The first runs the mutants of the Triton kernels that are listed below. Each is a copy of the tree
with one changed line, in which the tests of its backend run until one fails. The second runs
mutants that mutant_sources.py generates; a stopped run continues. Without names, both write
benchmarks/results/mutants.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import mutant_runs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"


class Mutant(NamedTuple):
    name: str
    path: str
    right: str
    wrong: str


_TRITON = "fused_attn/backends/triton/"
TRITON = [
    Mutant(
        "no rescale of the sum of weights",
        f"{_TRITON}forward.py",
        "total = total * rescale + tl.sum(weights, 1)",
        "total = total + tl.sum(weights, 1)",
    ),
    Mutant(
        "lse without what its rounding loses",
        f"{_TRITON}forward.py",
        "tl.store(lse_residual + at, low.to(tl.float32), inside)",
        "tl.store(lse_residual + at, low.to(tl.float32) * 0.0, inside)",
    ),
    Mutant(
        "delta of a rounded output",
        f"{_TRITON}backward.py",
        "(o.to(tl.int32, bitcast=True) + low.to(tl.int32))",
        "(o.to(tl.int32, bitcast=True) + 0 * low.to(tl.int32))",
    ),
    Mutant(
        "delta that is not corrected",
        f"{_TRITON}backward.py",
        "statistics[2] + error, i < seqlen_q",
        "statistics[2], i < seqlen_q",
    ),
    Mutant(
        "gradient of lse left out",
        f"{_TRITON}backward.py",
        "grads += grad_lse[:, None]",
        "grads += 0.0 * grad_lse[:, None]",
    ),
    Mutant(
        "slope of softcap left out",
        f"{_TRITON}backward.py",
        "grads *= 1.0 - cap_tanh * cap_tanh",
        "grads *= 1.0",
    ),
    Mutant(
        "dropout of other heads",
        f"{_TRITON}attention_tile.py",
        "head = first_head + sequence.h",
        "head = first_head",
    ),
    Mutant(
        "dropout of other keys",
        f"{_TRITON}attention_tile.py",
        "octet = first_octet + j_begin // 8",
        "octet = first_octet + j_begin // 16",
    ),
    Mutant(
        "NaN of unseen values",
        f"{_TRITON}attention_tile.py",
        "return tl.where((any_visible != 0)[:, None], tile, 0.0)",
        "return tile",
    ),
    Mutant(
        "the last key hidden",
        f"{_TRITON}masks.py",
        "hi = tl.minimum(bounds.key_end, i + bounds.band_hi + 1)",
        "hi = tl.minimum(bounds.key_end - 1, i + bounds.band_hi + 1)",
    ),
    Mutant(
        "a band that is one key too wide",
        f"{_TRITON}masks.py",
        "return tl.maximum(bounds.key_begin, i + bounds.band_lo), hi",
        "return tl.maximum(bounds.key_begin, i + bounds.band_lo - 1), hi",
    ),
    Mutant(
        "prefixes that are ignored",
        f"{_TRITON}masks.py",
        "hi = tl.where(prefix_end > 0, tl.minimum(hi, tl.maximum(prefix_end, i + 1)), hi)",
        "hi = tl.where(prefix_end > 0, tl.minimum(hi, i + 1), hi)",
    ),
    Mutant(
        "heads of keys and values mixed up",
        f"{_TRITON}attention_tile.py",
        "h_kv = h // (sizes.num_heads // sizes.num_heads_kv)",
        "h_kv = h % sizes.num_heads_kv",
    ),
    Mutant(
        "norm: variance of another number of columns",
        f"{_TRITON}norm.py",
        "variance = tl.sum(squares, 1, keep_dims=True) / COLUMNS",
        "variance = tl.sum(squares, 1, keep_dims=True) / (COLUMNS + 1)",
    ),
    Mutant(
        "norm: gradient without the mean",
        f"{_TRITON}norm.py",
        "g = row_rstd * (g - across - x * along)",
        "g = row_rstd * (g - x * along)",
    ),
]


def mutate(mutant: Mutant, tree: Path) -> None:
    """Apply a mutation to a copy of the tree."""
    path = tree / mutant.path
    text = path.read_text()
    assert text.count(mutant.right) >= 1, f"{mutant.name}: {mutant.path} has another line now"
    path.write_text(text.replace(mutant.right, mutant.wrong))


def first_failure(tree: Path) -> str | None:
    """Return the first failing test of the Triton stage in a tree; None if all tests pass."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": str(tree)}
    folders = ["tests/ops", "tests/backends", "tests/nn", "tests/tools"]
    options = ["-q", "-x", "-n", "2", "-k", "triton", "-m", "not thorough", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *folders, *options]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed or done.returncode == 0, done.stdout[-2000:]
    return failed[0].split()[1] if failed else None


def run_listed(names: list[str]) -> list[str]:
    """Run the mutants of `names`, or all; return those that survive."""
    chosen = [m for m in TRITON if not names or m.name in names]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for mutant in chosen:
            tree = Path(folder) / "tree"
            shutil.rmtree(tree, ignore_errors=True)
            ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*_output")
            shutil.copytree(ROOT, tree, ignore=ignored)
            mutate(mutant, tree)
            begin = time.monotonic()
            by = first_failure(tree)
            results[mutant.name] = by
            took = time.monotonic() - begin
            print(f"{mutant.name}: {f'by {by}' if by else 'SURVIVES'} ({took:.0f} s)", flush=True)
    if len(chosen) == len(TRITON):
        write({"noticed by": results})
    print(f"{sum(map(bool, results.values()))} of {len(results)} mutants are noticed")
    return [name for name, by in results.items() if by is None]


def write(changed: dict[str, Any]) -> None:
    """Change entries of the results. Each generated mutant takes one line of the file."""
    entries = json.loads(RESULTS.read_text()) | changed
    parts = []
    for name, value in entries.items():
        rows = ",\n".join(f"  {json.dumps(row)}" for row in value) if name != "noticed by" else ""
        parts.append(f' "{name}": ' + (f"[\n{rows}\n ]" if rows else json.dumps(value, indent=1)))
    RESULTS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants that are listed in this file; all")
    parser.add_argument("--source", choices=mutant_runs.TESTS, help="generate mutants of it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests a mutant")
    options = parser.parse_args()
    if options.source is None:
        raise SystemExit(bool(run_listed(options.names)))
    rows = mutant_runs.run(options.source, options.seed, options.count, options.limit)
    earlier = json.loads(RESULTS.read_text()).get(options.source, [])
    verdicts = {(r["path"], r["mutant"]): r["verdict"] for r in earlier if "verdict" in r}
    for row in rows:  # what was found out about survivors is written by hand
        if row["killed by"] in (None, "not reached") and (row["path"], row["mutant"]) in verdicts:
            row["verdict"] = verdicts[row["path"], row["mutant"]]
    write({options.source: rows})
    killed = [row for row in rows if row["killed by"] not in (None, "not reached")]
    print(f"{len(killed)} of {len(rows)} mutants are noticed")


if __name__ == "__main__":
    main()
