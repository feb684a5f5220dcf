"""What holds for the package as a whole: its objects, its headers, its version, its size."""

import os
import re
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import fused_attn

ROOT = Path(__file__).resolve().parents[2]
SOURCE_DIRS = ("csrc", "fused_attn", "tests", "benchmarks", "examples")
SOURCE_SUFFIXES = {".py", ".pyi", ".h", ".inc", ".in", ".cpp", ".cu", ".cuh", ".cmake"}
MAX_LINES = 500
MAX_ENVIRONMENT_VARIABLES = 4


def source_files(*dirs: str) -> list[Path]:
    return [p for d in dirs for p in sorted((ROOT / d).rglob("*")) if p.suffix in SOURCE_SUFFIXES]


def isa_objects() -> list[Path]:
    """The objects of the instruction sets, from the build directory of each compiler."""
    build_dirs = f"build/cmake-{sysconfig.get_config_var('SOABI')}*"
    return sorted(ROOT.glob(f"{build_dirs}/CMakeFiles/isa_*.dir/csrc/cpu/kernels.cpp.o"))


def test_isa_objects_have_no_weak_symbols():
    # The linker keeps one copy of a weak symbol, maybe the one with AVX-512, for every caller.
    objects = isa_objects()
    if not objects or shutil.which("nm") is None:
        reason = "needs nm and the objects of an editable install (make build)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    assert any("isa_generic.dir" in path.parts for path in objects)
    for path in objects:
        listing = subprocess.run(
            ["nm", "--defined-only", "--format=posix", "--demangle", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        # A demangled name may hold spaces; the type is the one letter before the hex address.
        weak = [line for line in listing.splitlines() if re.search(r" [WVuwv] [0-9a-f]+", line)]
        assert not weak, f"weak or unique symbols in {path}:\n" + "\n".join(weak)


def test_csrc_includes_no_torch_header():
    include = re.compile(r"^\s*#\s*include\s*[<\"](torch|ATen|c10|caffe2)/", re.MULTILINE)
    offenders = [str(p) for p in source_files("csrc") if include.search(p.read_text())]
    assert not offenders


def test_version_is_that_of_the_metadata():
    assert fused_attn.__version__ == metadata.version("fused-attn")


def test_files_are_short():
    files = [*source_files(*SOURCE_DIRS), ROOT / "setup.py", ROOT / "CMakeLists.txt"]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    assert not {p: n for p, n in lengths.items() if n > MAX_LINES}


def test_environment_variables_are_few_and_in_the_docs():
    quoted = re.compile(r"[\"'](FUSED_ATTN_[A-Z0-9_]+)[\"']")
    sources = [*source_files("csrc", "fused_attn"), ROOT / "setup.py"]
    used = {name for path in sources for name in quoted.findall(path.read_text())}
    rows = re.findall(r"^\|.*$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    documented = set(re.findall(r"FUSED_ATTN_[A-Z0-9_]+", "\n".join(rows)))
    assert used == documented
    assert len(documented) <= MAX_ENVIRONMENT_VARIABLES
