"""Run the kernel tests under sanitizers (`make sanitize`).

    python scripts/sanitize.py [address] [thread] [emulator] [planted]

- address: AddressSanitizer and UndefinedBehaviorSanitizer on the CPU kernels, on the best
  instruction set of this CPU and on `generic`. New memory holds NaN, also in workspaces, and ASan
  checks gaps between the parts of a workspace.
- thread: ThreadSanitizer on the CPU kernels, on two threads. csrc/cpu/team_tsan.cpp reports to it
  what libgomp synchronizes.
- emulator: the sanitizers of `address` on the CUDA kernels, in the emulator.
- planted: each mistake in PLANTED, compiled into a copy of one object, has to be reported.

The modules are built in build/sanitize, each in a copy of the package that links to its Python
files. The module in fused_attn/ is not replaced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
FLAGS = {"address": "address,undefined", "emulator": "address,undefined", "thread": "thread"}
EXTRA_ISAS = {"address": ["generic"], "thread": []}  # beside this CPU's best
PRELOAD = {
    # libstdc++ too, because libasan looks up __cxa_throw when it is loaded, before the module.
    "address": ["libasan.so", "libstdc++.so"],
    "thread": ["libtsan.so"],
}
OPTIONS = {
    "ASAN_OPTIONS": [
        "detect_leaks=0",  # Python and torch do not free everything at exit
        "max_malloc_fill_size=1000000000:malloc_fill_byte=255",  # NaN in every floating-point type
        "allocator_may_return_null=1",  # tests request more memory than there is
        "use_sigaltstack=0",  # Linux refuses tile registers with ASan's small signal stack
    ],
    "UBSAN_OPTIONS": ["halt_on_error=1", "print_stacktrace=1"],
    "TSAN_OPTIONS": [
        "halt_on_error=1",
        "ignore_noninstrumented_modules=1",  # torch and Python synchronize by means unknown to TSan
    ],
}
KERNELS = "attention bias decode dropout few_queries isas masks norm partial rotary tiles varlen"
TESTS = [f"tests/ops/test_{name}.py" for name in KERNELS.split()]
TESTS += ["tests/nn/test_nn_activation.py", "tests/nn/test_nn_weights.py"]
# TSan needs several tasks in each kernel, but not every mask and type.
THREADED = [f"tests/ops/test_{name}.py" for name in ("isas", "decode", "varlen", "rotary")]
EMULATED = [
    "tests/ops/test_attention.py",
    "tests/ops/test_decode.py",
    "tests/backends/test_cuda_norm.py",
]


class Planted(NamedTuple):
    name: str
    sanitizer: str
    right: str
    wrong: str
    report: str


PLANTED_IN = "cpu/kernels/attention_decode.h"  # compiled into kernels_decode.cpp
PLANTED = [
    Planted(
        "a read past the last row",
        "address",
        "min64(begin + per_split, num_keys), shape.at(",
        "min64(begin + per_split, num_keys) + 1, shape.at(",
        "heap-buffer-overflow",
    ),
    Planted(
        "an uninitialized workspace",
        "address",
        "if (query_rows(p, b).count == 0) continue;\n          kernel",
        "if (query_rows(p, b).count == 0 || begin == 0) continue;\n          kernel",
        "Error: a result is not finite",
    ),
    Planted(
        "a race between tasks",
        "thread",
        "#pragma omp for schedule(dynamic)\n",
        "#pragma omp for schedule(dynamic) nowait\n",
        "ThreadSanitizer: data race",
    ),
]
# 700 keys are three splits, which the kernel merges.
PLANTED_CALL = """
import torch
from fused_attn import scaled_dot_product_attention
from fused_attn.base import small_calls
small_calls.limits = small_calls.NONE
query, key = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 700, 64)
for _ in range(20):
    out = scaled_dot_product_attention(query, key, key)
    assert out.isfinite().all(), "a result is not finite"
"""


def run(*command: object, **environment: str) -> None:
    subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=os.environ | environment, check=True
    )


def instruction_sets() -> list[str]:
    """Return the best instruction set of this CPU, its base, the base of that, and so on."""
    from fused_attn.backends import cpp

    text = (ROOT / "csrc/cpu/isas.inc").read_text()
    bases = dict(re.findall(r"^FUSED_ATTN_ISA\((\w+), (\w+)\)", text, re.MULTILINE))
    chain = [cpp.isa()]
    while bases[chain[-1]] != chain[-1]:
        chain.append(bases[chain[-1]])
    return chain


def configure(tree: Path, folder: Path, *options: str) -> str:
    """Configure a build of the CMake project in `tree` in a folder; return the path of CMake."""
    import cmake
    import pybind11

    program = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    options += (
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    )
    run(program, "-S", tree, "-B", folder, "-G", "Ninja", "--log-level=WARNING", *options)
    return program


def build(name: str) -> None:
    """Build the module of one check, and for a CPU module the package that contains it."""
    tree, folder, options = ROOT, BUILD / name / "cmake", [f"-DFUSED_ATTN_SANITIZE={FLAGS[name]}"]
    if name == "emulator":
        tree = ROOT / "tests/cuda_emulator"
    else:
        options += [f"-DFUSED_ATTN_ISAS={';'.join([*instruction_sets(), *EXTRA_ISAS[name]])}"]
    program = configure(tree, folder, *options)
    run(program, "--build", folder)
    if name != "emulator":
        run(program, "--install", folder, "--prefix", BUILD / name)
        link_package(BUILD / name / "fused_attn")


def link_package(package: Path) -> None:
    """Link everything in fused_attn/ but its modules into a folder that has another module."""
    for source in (ROOT / "fused_attn").iterdir():
        link = package / source.name
        if source.suffix != ".so" and not link.is_symlink():
            link.symlink_to(source)


def environment(name: str, **more: str) -> dict[str, str]:
    """Return the environment in which Python runs the module of one check."""
    compiler = os.environ.get("CXX", "c++")
    paths = [
        subprocess.run(
            [compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for library in PRELOAD.get(name, PRELOAD["address"])
    ]
    options = {variable: ":".join(values) for variable, values in OPTIONS.items()}
    package = ROOT if name == "emulator" else BUILD / name
    return {**options, "LD_PRELOAD": ":".join(paths), "PYTHONPATH": str(package), **more}


def python(name: str) -> list[str]:
    # TSan's shadow memory has fixed addresses, which address space randomization may occupy.
    return [*(["setarch", "-R"] if name == "thread" else []), sys.executable, "-P"]


def test(name: str, tests: Sequence[str], *options: str, **more: str) -> None:
    # Capturing only sys: a sanitizer writes its report to stderr and ends the process.
    pytest = ["-m", "pytest", "-q", "-x", "--capture=sys", "-p", "no:cacheprovider"]
    run(
        *(*python(name), *pytest, *("-m", "not thorough"), *tests, *options),
        **environment(name, **more),
    )


def planted(mistake: Planted) -> bool:
    """Compile a mistake into a copy of one object, and return True if it is reported."""
    import ninja

    header, folder = ROOT / "csrc" / PLANTED_IN, BUILD / "planted"
    assert header.read_text().count(mistake.right) == 1, f"{mistake.name}: {header} has changed"
    copy = folder / "csrc" / PLANTED_IN
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(header.read_text().replace(mistake.right, mistake.wrong))
    package = folder / "fused_attn"
    package.mkdir(exist_ok=True)
    link_package(package)
    made = BUILD / mistake.sanitizer / "cmake"
    listing = [Path(ninja.BIN_DIR) / "ninja", "-C", made, "-t", "commands"]
    commands = subprocess.run(
        listing, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    isa = instruction_sets()[-1]  # the kernels of float32
    unit = f"CMakeFiles/isa_{isa}.dir/csrc/cpu/kernels_decode.cpp.o"
    module = f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    # Without UBSan, whose checks take most of the time to compile.
    compiling = next(c for c in commands if f"-o {unit} " in c) + " -fno-sanitize=undefined"
    linking = next(c for c in commands if f"-o {module} " in c)
    for command in (
        compiling.replace(f" -I{ROOT}/csrc", f" -I{folder}/csrc -I{ROOT}/csrc"),
        linking.replace(f"-o {module} ", f"-o {package / module} "),
    ):
        command = command.replace(unit, str(folder / "kernels_decode.o"))
        subprocess.run(command, shell=True, cwd=made, check=True)
    path = {
        "PYTHONPATH": str(folder),
        "FUSED_ATTN_CPU_ISA": isa,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [*python(mistake.sanitizer), "-c", PLANTED_CALL],
        env=os.environ | environment(mistake.sanitizer, **path), capture_output=True, text=True,
    )  # fmt: skip
    reported = done.returncode != 0 and mistake.report in done.stderr
    print(f"planted: {mistake.name}: {'reported' if reported else 'MISSED'}", flush=True)
    if not reported:
        print(done.stdout[-500:], done.stderr[-3000:])
    return reported


def check(name: str) -> None:
    """Run one of the four checks."""
    if name == "planted":
        missed = [mistake.name for mistake in PLANTED if not planted(mistake)]
        if missed:
            raise SystemExit(1)
        return
    build(name)
    best = instruction_sets()[0]
    if name == "emulator":
        test(name, EMULATED, "-k", "cuda", CUDA_EMULATED=str(BUILD / name / "cmake"))
    elif name == "thread":
        test(name, THREADED, FUSED_ATTN_CPU_ISA=best, OMP_NUM_THREADS="2")
    else:
        for isa in dict.fromkeys([best, *EXTRA_ISAS[name]]):
            test(name, TESTS, FUSED_ATTN_CPU_ISA=isa)


def main() -> None:
    for name in sys.argv[1:] or ["address", "thread", "emulator", "planted"]:
        began = time.perf_counter()
        check(name)
        print(f"{name}: passed in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
