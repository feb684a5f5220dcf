"""Packaging: object files, headers, version, file lengths and build options."""

import os
import re
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import commands
import pytest
from commands import ROOT, output_of

import fused_attn
from fused_attn.backends import verdicts

SOURCE_DIRS = ("csrc", "fused_attn", "tests", "benchmarks", "examples")
SOURCE_SUFFIXES = {".py", ".pyi", ".h", ".inc", ".in", ".cpp", ".cu", ".cuh", ".cmake"}
MAX_LINES = 500
MAX_ENVIRONMENT_VARIABLES = 4


def source_files(*dirs: str) -> list[Path]:
    return [p for d in dirs for p in sorted((ROOT / d).rglob("*")) if p.suffix in SOURCE_SUFFIXES]


def test_isa_objects_have_no_weak_symbols():
    # The linker keeps one copy of a weak symbol for all callers, possibly the one with AVX-512.
    build_dirs = f"build/cmake-{sysconfig.get_config_var('SOABI')}-*"
    objects = list(ROOT.glob(f"{build_dirs}/CMakeFiles/isa_*.dir/csrc/cpu/kernels*.cpp.o"))
    if not objects or shutil.which("nm") is None:
        reason = "needs nm and the objects of an editable install (make build)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    assert any("isa_generic.dir" in path.parts for path in objects)
    for path in objects:
        listing = output_of("nm", "--defined-only", "--format=posix", "--demangle", path)
        # Demangled names may contain spaces; the symbol type is the letter before the address.
        weak = [line for line in listing.splitlines() if re.search(r" [WVuwv] [0-9a-f]+", line)]
        assert not weak, f"weak or unique symbols in {path}:\n" + "\n".join(weak)


def test_csrc_includes_no_torch_header():
    include = re.compile(r"^\s*#\s*include\s*[<\"](torch|ATen|c10|caffe2)/", re.MULTILINE)
    offenders = [str(p) for p in source_files("csrc") if include.search(p.read_text())]
    assert not offenders


@pytest.mark.parametrize("repository", ["https://example.org/some/fork", ""])
def test_metadata_links_to_the_repository_of_the_build(repository, tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    output_of(*command, cwd=ROOT, env=os.environ | {"RELEASE_REPOSITORY": repository})
    (written,) = tmp_path.glob("*.egg-info/PKG-INFO")
    links = re.findall("^Project-URL: (.*), (.*)$", written.read_text(), re.MULTILINE)
    assert bool(links) == bool(repository) and all(url.startswith(repository) for _, url in links)


def test_version_equals_that_of_the_metadata():
    assert fused_attn.__version__ == metadata.version("fused-attn")
    assert f"version: {fused_attn.__version__}\n" in (ROOT / "CITATION.cff").read_text()


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


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def cmake_arguments(tmp_path: Path, **variables: str) -> list[str]:
    """Return the arguments that setup.py passes to CMake under the given environment variables."""
    log = tmp_path / "arguments"
    executable(tmp_path / "cmake", f'printf "%s\\n" "$@" >> "{log}"')
    # setup.py prefers the cmake of the Python module `cmake`, so that module is replaced too.
    (tmp_path / "cmake.py").write_text(f"CMAKE_BIN_DIR = {str(tmp_path)!r}\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_ATTN_CUDA")}
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib"]
    output_of(
        *command, "--build-temp", tmp_path / "temp",
        cwd=ROOT, env={**environment, "PYTHONPATH": path, **variables},
    )  # fmt: skip
    return log.read_text().splitlines()


@pytest.mark.parametrize(
    ("value", "built"), [(None, "OFF"), ("", "OFF"), ("0", "OFF"), ("1", "ON")]
)
def test_cuda_is_built_on_request(value, built, tmp_path):
    given = {} if value is None else {"FUSED_ATTN_CUDA": value}
    given["FUSED_ATTN_CUDA_ARCHS"] = "80, 90a"
    arguments = cmake_arguments(tmp_path, **given)
    assert f"-DFUSED_ATTN_CUDA={built}" in arguments
    assert "-DFUSED_ATTN_CUDA_ARCHS=80;90a" in arguments


def test_an_invalid_switch_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="FUSED_ATTN_CUDA must be 0 or 1, got 'yes'"):
        cmake_arguments(tmp_path, FUSED_ATTN_CUDA="yes")


def test_setup_has_no_compiler_flags():
    text = (ROOT / "setup.py").read_text()
    assert not re.search(r"""["']-(O\d|m[a-z]|f[a-z]|W|std|gencode|arch|l[a-z])""", text)


def configured(tmp_path: Path, *options: str) -> str:
    """Run CMake with options, and with tmp_path first on PATH; return its output."""
    pybind11 = pytest.importorskip("pybind11", reason="reason: needs pybind11")
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("reason: needs cmake and ninja")
    done = commands.run(
        "cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *options, env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    return done.stdout + done.stderr


def test_nvcc_is_used_only_on_request(tmp_path):
    executable(tmp_path / "nvcc", f'touch "{tmp_path}/called"; exit 1')
    text = configured(tmp_path, "-DFUSED_ATTN_CUDA=OFF")
    assert "CUDA module: not built (set FUSED_ATTN_CUDA=1 to build it)" in text
    assert "Build files have been written" in text
    assert not (tmp_path / "called").exists()
    text = configured(tmp_path, "-DFUSED_ATTN_CUDA=ON")
    assert "requests the CUDA module, but no working nvcc was" in text
    assert (tmp_path / "called").exists()


def test_windows_is_refused_before_compilers_are_detected(tmp_path):
    text = " ".join(configured(tmp_path, "-DMSVC=ON").split())
    assert "does not build on Windows" in text and "WSL" in text
    assert "compiler identification" not in text


def test_the_error_without_openmp_names_packages(tmp_path):
    """If the compiler rejects -fopenmp, CMake's error names the packages to install."""
    refusal = "case \"$*\" in *openmp*) echo 'unrecognized option' >&2; exit 1;; esac"
    compiler = executable(tmp_path / "no-openmp", f'{refusal}\nexec g++ "$@"')
    text = configured(tmp_path, f"-DCMAKE_CXX_COMPILER={compiler}")
    assert "fused_attn needs OpenMP" in text and "libomp-dev" in text and "brew" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="reason: needs nvcc")
def test_cuda_is_built_for_the_installed_gpus(tmp_path):
    def built_for(gpus: str, *archs: str) -> tuple[str, set[str]]:
        executable(tmp_path / "nvidia-smi", gpus)
        text = configured(
            tmp_path, "-DFUSED_ATTN_CUDA=ON", f"-DFUSED_ATTN_CUDA_ARCHS={';'.join(archs)}"
        )
        (line,) = re.findall(r"CUDA module: (.*)", text)
        return line, set(re.findall(r"compute_\d+a?", (tmp_path / "build/build.ninja").read_text()))

    line, built = built_for(r'printf "9.0\n8.6\n9.0\n7.5\n"')
    assert re.fullmatch(r"for 90a;86, about \d+ minutes on \d+ cores", line)
    assert built == {"compute_90a", "compute_86"}
    line, built = built_for("echo NVIDIA-SMI 535.10 has failed; exit 9")
    assert line.startswith("for all GPUs (none was found here; ")
    assert built >= {"compute_80", "compute_90a"}
    line, built = built_for("echo 99.9")
    assert line.startswith("for all GPUs (nvcc does not know sm_999, but newer GPUs run its PTX; ")
    line, built = built_for("echo 9.0", "80", "100")
    assert line.startswith("for 80;100, about")
    assert built == {"compute_80", "compute_100"}


# The caller can set FUSED_ATTN_CUDA=0: machines that test only Triton need no nvcc.
BY_DEFAULT = "FUSED_ATTN_CUDA=${FUSED_ATTN_CUDA-1} "
TARGETS = {
    "build": "",
    "cuda-build": "FUSED_ATTN_CUDA=1 ",
    "gpu-build": BY_DEFAULT,
    "gpu-test": BY_DEFAULT,
    "gpu-bench": BY_DEFAULT,
}


@pytest.mark.parametrize("target", TARGETS)
def test_cuda_switch_of_make_targets(target):
    if shutil.which("make") is None:
        pytest.skip("reason: needs make")
    printed = output_of("make", "--dry-run", target, cwd=ROOT)
    last = [line for line in printed.splitlines() if "setup.py" in line][-1]
    assert "".join(re.findall(r"FUSED_ATTN_CUDA=\S+ ", last)) == TARGETS[target]


def test_verdicts_cover_the_head_dims_of_cuda_kernels():
    lines = (ROOT / "csrc/cuda/head_dims.inc").read_text()
    widths = re.findall(r"^FUSED_ATTN_HEAD_DIM\((\d+)\)", lines, re.MULTILINE)
    assert tuple(map(int, widths)) == verdicts.WIDTHS
