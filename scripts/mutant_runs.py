"""Compile generated mutants, and run the tests on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutant_sources import MAX_MUTANTS, ROOT, Mutant, by_path, sample, with_switches
from sanitize import TESTS as KERNEL_TESTS
from sanitize import configure, instruction_sets, link_package

BUILD = ROOT / "build" / "mutants"
_ON_CPU = ["-k", "not triton and not cuda"]
# Masks are the same for every dtype and instruction set. Tests that compile are slow.
_PLAIN = ["-k", "not (triton or cuda or f16 or f64 or avx or amx or compil or test_flex.py)"]
_MORE = ["tests/nn", "tests/backends"]
_USES = ["tests/compat", "tests/nn/test_nn_causal.py", "tests/tools/test_mask_picture.py"]
_USES += [f"tests/backends/test_{n}.py" for n in ("sdpa", "sdpa_kept", "flash_arguments")]
_USES += [f"tests/distributed/test_{n}.py" for n in ("balance", "plan")]
# The tests that run on each mutant, and those that run on what survives them.
TESTS = {
    "cpu": [
        [*KERNEL_TESTS, "-k", "cpp and not f16 and not f64"],
        ["tests/ops", "tests/nn", *_ON_CPU],
    ],
    "cuda": [["tests/ops", "-k", "cuda"], [*_MORE, "-k", "cuda"]],
    "triton": [
        ["tests/ops", "-k", "triton and not (16 or f64)"],
        ["tests/ops", *_MORE, "-k", "triton and (16 or f64 or test_nn or test_t)"],
    ],
    "masks": [["tests/ops", *_PLAIN], [*_USES, *_PLAIN]],
}
_ENVIRONMENT = {
    "cpu": {"PYTHONPATH": f"{BUILD}/cpu:{ROOT}/scripts"},
    "cuda": {"CUDA_EMULATED": f"{BUILD}/cuda/cmake"},
    "triton": {"TRITON_INTERPRET": "1"},
    "masks": {},
}
HEADER = f"""\
extern "C" int fused_attn_mutant, fused_attn_reached[{MAX_MUTANTS}];
static inline bool fused_attn_m(int number) {{
  fused_attn_reached[number] = 1;
  return number == fused_attn_mutant;
}}
"""
DEFINITIONS = f"""
#pragma GCC visibility push(default)
extern "C" {{ int fused_attn_mutant, fused_attn_reached[{MAX_MUTANTS}]; }}
#pragma GCC visibility pop
"""
# The second option fuses products and sums, as -O3 does.
_OPTIMIZED, _FASTER_TO_COMPILE = "    -O3\n", "    -O1\n    -fexpensive-optimizations\n"
_DEFINED_IN = {"cpu": "csrc/cpu/dispatch.cpp", "cuda": "csrc/bind_cuda.cpp"}


def build(source: str, mutants: Sequence[Mutant]) -> set[int]:
    """Compile the mutants of "cpu" or "cuda" into one module; return the numbers that compile.

    Those that do not are also stored, because finding them takes a whole build.
    """
    tree, made = BUILD / source / "tree", BUILD / source / "cmake"
    options = [f"-DCMAKE_CXX_FLAGS=-include {tree / 'csrc/mutants.h'} -w"]
    options += [f"-DFUSED_ATTN_ISAS={';'.join(instruction_sets())}"] * (source == "cpu")
    stored = BUILD / source / "not_compiling.json"
    wrong = json.loads(stored.read_text()) if stored.exists() else []
    numbers = {n for n, mutant in enumerate(mutants, 1) if list(mutant) not in wrong}
    write_tree(source, tree, by_path(mutants, numbers))
    program = configure(tree if source == "cpu" else tree / "tests/cuda_emulator", made, *options)
    command = [program, "--build", str(made), "--", "-k", "0"]
    command += ["-j", os.environ.get("MUTANTS_JOBS", "2")]
    while True:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
        found = _mentioned(done.stdout, tree, mutants, ": (?:fatal )?error:") & numbers
        found = found or _mentioned(done.stdout, tree, mutants, "") & numbers
        assert found, done.stdout[-3000:]
        numbers -= found
        wrong += [mutants[n - 1] for n in found]
        stored.write_text(json.dumps(wrong))
        print(f"{len(found)} mutants do not compile", flush=True)
        write_tree(source, tree, by_path(mutants, numbers))
    if source == "cpu":
        package = BUILD / source / "fused_attn"
        install = [program, "--install", str(made), "--prefix", str(package.parent)]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        link_package(package)
    return numbers


def write_tree(source: str, tree: Path, mutants: dict[str, dict[int, Mutant]]) -> None:
    """Write a copy of the C++ sources with mutants. Files that are the same are not written."""
    files = [ROOT / "CMakeLists.txt"]
    for folder in ("csrc", "tests/cuda_emulator", "tests/x86_emulator"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    for path, mine in mutants.items():
        texts[path] = with_switches(texts[path], mine)
    texts[_DEFINED_IN[source]] += DEFINITIONS
    assert texts["CMakeLists.txt"].count(_OPTIMIZED) == 1
    texts["CMakeLists.txt"] = texts["CMakeLists.txt"].replace(_OPTIMIZED, _FASTER_TO_COMPILE)
    for path, text in {**texts, "csrc/mutants.h": HEADER}.items():
        copy = tree / path
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


def _mentioned(text: str, tree: Path, mutants: Sequence[Mutant], what: str) -> set[int]:
    """Return the mutants in whose lines the compiler reports something."""
    found = re.findall(rf"{tree}/(\S+?):(\d+)(?::\d+)?{what}", text)
    lines = {(os.path.normpath(path), int(line)) for path, line in found}
    return {n for n, mutant in enumerate(mutants, 1) if (mutant.path, mutant.line) in lines}


def run(source: str, seed: int, count: int, limit: float) -> list[dict[str, Any]]:
    """Run the tests on mutants of a source, and return a row for each.

    A run that was stopped continues, if the sources and the seed are the same, and it has at least
    as many mutants.
    """
    folder = BUILD / source
    folder.mkdir(parents=True, exist_ok=True)
    mutants = sample(source, seed, count)
    name = f"{seed}-{zlib.crc32(repr(sample(source, seed, MAX_MUTANTS)).encode()):08x}"
    compiled = source in _DEFINED_IN
    numbers = build(source, mutants) if compiled else set(range(1, len(mutants) + 1))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    module = {"cpu": f"fused_attn/_cpu{suffix}", "cuda": f"cmake/_cuda_emulated{suffix}"}
    found: dict[int, tuple[str | None, float]] = {}
    for stage, tests in enumerate(TESTS[source]):
        results = folder / f"{name}-{stage}.jsonl"
        results.touch()
        alive = [n for n in sorted(numbers) if not found.get(n, ("", 0))[0]]
        done = {json.loads(line)[0] for line in results.read_text().splitlines()}
        arguments = {
            "mutants": [(n, mutants[n - 1]) for n in alive if n not in done],
            "module": str(folder / module[source]) if compiled else None,
            "results": str(results),
            "baseline": str(folder / f"{name}-{stage}-{count}-baseline.json"),
            "limit": limit,
        }
        if arguments["mutants"]:
            (folder / "run.json").write_text(json.dumps(arguments))
            environment = {
                "MUTANTS_RUN": str(folder / "run.json"),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}:{ROOT}/scripts",
                **_ENVIRONMENT[source],
            }
            options = ["-q", "--tb=no", "-m", "not thorough", "-p", "no:cacheprovider"]
            options += ["-p", "mutant_tests"]
            command = [sys.executable, "-P", "-m", "pytest", *options, *tests]
            subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
        for line in results.read_text().splitlines():
            number, killer, seconds = json.loads(line)
            if number in alive:
                earlier = found.get(number, ("", 0.0))
                best = killer or (None if None in (killer, earlier[0]) else "")
                found[number] = best, earlier[1] + seconds
    return [_row(mutants[n - 1], *found[n]) for n in sorted(found)]


def _row(mutant: Mutant, killer: str | None, seconds: float) -> dict[str, Any]:
    line = (ROOT / mutant.path).read_text().splitlines()[mutant.line - 1]
    return {
        "path": mutant.path,
        "line": mutant.line,
        "kind": mutant.kind,
        "text": line.strip(),
        "mutant": mutant.apply(line, "true").strip(),
        "killed by": "not reached" if killer == "" else killer,
        "seconds": round(seconds, 1),
    }
