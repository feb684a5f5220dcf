"""Compare the ARM kernels' main loops with a Neoverse V2's minimum cycles: `make arm-report`.

kernels.cpp is compiled to assembly for each ARM instruction set. For each kind of multiply
instruction, the main loop is the innermost loop that loads its operands and has the largest share
of these instructions. llvm-mca estimates the cycles of one iteration on a Neoverse V2. The minimum
("floor") assumes four multiply instructions per cycle (Arm, "Neoverse V2 Software Optimization
Guide", tables of ASIMD floating-point and BFloat16 instructions). None of these loops has run on a
Neoverse V2.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/arm-loops.json"
# Compiler flags: those of CMakeLists.txt, but -O2, with which the results were made.
FLAGS = ["-std=c++17", "-O2", "-fpeel-loops", "-fvect-cost-model=dynamic"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-exceptions", "-fopenmp", "-fPIC", "-w", "-DFUSED_ATTN_NEON"]
ISAS = {
    "neon": [],
    "neon_bf16": ["-DFUSED_ATTN_NEON_BF16", "-march=armv8.2-a+bf16"],
}
PER_CYCLE = 4  # peak rate of the multiply instructions in PRODUCTS
TURNS = 200  # loop iterations that llvm-mca simulates

# (instruction, lanes) -> multiply-adds per instruction.
PRODUCTS = {
    "neon": {("fmla", "4s"): 4, ("fmla", "2d"): 2},
    "neon_bf16": {("bfmmla", "4s"): 16},
}


@dataclass
class Loop:
    """One iteration of a kernel's main loop.

    Attributes:
        products: number of multiply instructions.
        cycles: estimate of llvm-mca for a Neoverse V2.
        floor: minimum cycles, which the multiply instructions alone would take.
        multiply_adds: multiply-adds per cycle.
    """

    isa: str
    instruction: str
    instructions: int
    products: int
    cycles: float
    floor: float
    multiply_adds: float


def assembly(compiler: str, isa: str) -> list[str]:
    """Compile the kernels for an instruction set; return the lines of assembly."""
    command = [compiler, *FLAGS, *ISAS[isa], f"-DFUSED_ATTN_ISA={isa}"]
    command += [f"-DFUSED_ATTN_BASE={isa}", f"-I{ROOT / 'csrc'}"]
    command += ["-S", "-o", "-", str(ROOT / "csrc/cpu/kernels.cpp")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")


def innermost_loops(lines: list[str]) -> Iterator[list[str]]:
    """Yield the instructions of each innermost loop, from its label to the branch back."""
    start, label = 0, ""
    for at, line in enumerate(lines):
        if found := re.match(r"(\.L\d+):", line):
            start, label = at + 1, found[1]
        elif label and re.search(rf"\bb\S*\s.*?{re.escape(label)}$", line):
            body = (part.strip() for part in lines[start : at + 1])
            yield [part for part in body if part and not part.startswith(".")]


def main_loop(loops: list[list[str]], mnemonic: str, lanes: str) -> list[str] | None:
    """Return the operand-loading loop with the largest share of multiplies; None if none has 8."""

    def products(body: list[str]) -> int:
        return sum(part.split()[0] == mnemonic and f".{lanes}" in part.split()[1] for part in body)

    loading = [
        body
        for body in loops
        if products(body) >= 8 and any(part.startswith("ld") for part in body)
    ]
    return max(loading, key=lambda body: products(body) / len(body), default=None)


def cycles_of(mca: str, body: list[str]) -> float:
    """Return the cycles of one iteration, averaged over many consecutive iterations."""
    command = [mca, "-mtriple=aarch64", "-mcpu=neoverse-v2", f"-iterations={TURNS}"]
    shown = subprocess.run(
        command, input="\n".join(body), check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"Total Cycles:\s+(\d+)", shown)
    assert found, shown
    return int(found[1]) / TURNS


def report(compiler: str, mca: str) -> list[Loop]:
    rows = []
    for isa, kinds in PRODUCTS.items():
        loops = list(innermost_loops(assembly(compiler, isa)))
        for (mnemonic, lanes), each in kinds.items():
            body = main_loop(loops, mnemonic, lanes)
            assert body is not None, f"{isa} has no loop of {mnemonic} .{lanes}"
            count = sum(part.split()[0] == mnemonic for part in body)
            cycles = cycles_of(mca, body)
            rows.append(
                Loop(
                    isa=isa,
                    instruction=f"{mnemonic} .{lanes}",
                    instructions=len(body),
                    products=count,
                    cycles=round(cycles, 2),
                    floor=count / PER_CYCLE,
                    multiply_adds=round(count * each / cycles, 1),
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    parser.add_argument("--mca", default="llvm-mca-19", help="of LLVM 17 or later")
    args = parser.parse_args()
    rows = report(args.compiler, args.mca)
    version = subprocess.run(
        [args.compiler, "-dumpfullversion"], check=True, capture_output=True, text=True
    ).stdout.strip()
    found = {"core": "Neoverse V2, llvm-mca's model", "compiler": f"GCC {version}"}
    found |= {"loops": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        share = row.floor / row.cycles
        print(
            f"{row.isa:10} {row.instruction:11} {row.instructions} instructions, {row.products} "
            f"products: {row.cycles} cycles, floor {row.floor} ({share:.0%}), "
            f"{row.multiply_adds} multiply-adds a cycle"
        )


if __name__ == "__main__":
    main()
