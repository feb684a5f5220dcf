"""The loops that measure a CPU's peak rates contain all instructions that they count."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
if COMPILER is None or platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("reason: needs g++ for x86-64", allow_module_level=True)

SOURCE = """
#include "cpu/kernels/peak.h"
extern "C" const int chains = fused_attn::{chains};
extern "C" double spin(int64_t rounds) {{ return fused_attn::{loop}(rounds); }}
"""
MULTIPLY_ADD = SOURCE.format(chains="kPeakChains", loop="spin_multiply_add")
PAIRS = SOURCE.format(chains="kPairChains", loop="spin_pairs")


def compiler_flags(isa: str) -> list[str]:
    """Return the flags of an instruction set from CMakeLists.txt."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(rf"set\(isa_flags_{isa} (.*)\)", text)
    assert found, isa
    expanded = (
        compiler_flags(word[len("${isa_flags_") : -1]) if word.startswith("$") else [word]
        for word in found[1].strip('"').split()
    )
    return [flag for flags in expanded for flag in flags]


@pytest.mark.parametrize(
    ("cpu", "source", "instruction"),
    [
        ("generic", MULTIPLY_ADD, "mulps"),
        ("avx2", MULTIPLY_ADD, "vfmadd"),
        ("avx512", MULTIPLY_ADD, "vfmadd"),
        ("avx512_bf16", PAIRS, "vdpbf16ps"),
    ],
)
def test_all_chains_are_in_the_loop(
    cpu: str, source: str, instruction: str, tmp_path: Path
) -> None:
    """One innermost loop contains an instruction per dependency chain."""
    path = tmp_path / "peak.cpp"
    path.write_text(source)
    command = [str(COMPILER), "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-exceptions", "-w"]
    command += [*compiler_flags(cpu), f"-I{ROOT / 'csrc'}", "-fopenmp", "-S", "-o", "-", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    at = lines.index("chains:")
    (chains,) = re.findall(r"\.long\s+(\d+)", lines[at + 1])
    counts = [sum(i.startswith(instruction) for i in body) for body in innermost_loops(lines)]
    assert max(counts) == int(chains), f"{cpu}: {counts}"


def innermost_loops(lines: list[str]) -> list[list[str]]:
    """Return the instructions of each innermost loop, from its label to its backward jump."""
    loops, body, label = [], [], ""
    for line in lines:
        if found := re.match(r"(\.L\w+):", line):
            label, body = found[1], []
            continue
        body.append(line.strip())
        if label and re.match(rf"\s+j\w+\s+{re.escape(label)}$", line):
            loops.append(body)
    return loops
