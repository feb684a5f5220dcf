"""Builds the compiled modules by handing them to CMake, which holds every compiler flag."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# One for each Python version and ABI, and each compiler that is named: CMake asks CXX but once. It
# stays, so that the next build compiles what changed only.
COMPILER = re.findall(r"[\w+.]+", os.environ.get("CXX", ""))
BUILD_DIR = ROOT / "build" / "-".join(["cmake", sysconfig.get_config_var("SOABI"), *COMPILER])
CUDA_SWITCH = {None: "OFF", "": "OFF", "0": "OFF", "1": "ON"}


def find_tool(name: str) -> str:
    """The program on the PATH (pip's isolated build environment is), else beside this Python."""
    path = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if path is None:
        raise SystemExit(f"fused_attn: {name} not found; install it: pip install {name}")
    return path


def cuda_options() -> list[str]:
    switch = os.environ.get("FUSED_ATTN_CUDA")
    if switch not in CUDA_SWITCH:
        raise SystemExit(f"fused_attn: FUSED_ATTN_CUDA must be 0 or 1, got {switch!r}")
    archs = re.split(r"[\s,;]+", os.environ.get("FUSED_ATTN_CUDA_ARCHS", "").strip())
    return [
        f"-DFUSED_ATTN_CUDA={CUDA_SWITCH[switch]}",
        f"-DFUSED_ATTN_CUDA_ARCHS={';'.join(archs)}",
    ]


def run_cmake(*args: str) -> None:
    try:
        subprocess.run([find_tool("cmake"), *args], check=True)
    except subprocess.CalledProcessError:
        raise SystemExit("fused_attn: the build failed; see the message above") from None


class CMakeBuild(build_ext):
    def run(self) -> None:
        self.configure_and_build()
        if self.inplace:
            # A new file, not new bytes in the old one: a process may have that one mapped.
            self.remove_modules(ROOT)
        super().run()

    def build_extensions(self) -> None:
        # CMake decides which modules there are: one of an earlier build must not slip in.
        self.remove_modules(Path(self.build_lib))
        run_cmake("--install", str(BUILD_DIR), "--prefix", str(Path(self.build_lib).resolve()))

    def remove_modules(self, prefix: Path) -> None:
        for extension in self.extensions:
            (prefix / self.get_ext_filename(extension.name)).unlink(missing_ok=True)

    def configure_and_build(self) -> None:
        try:
            import pybind11
        except ImportError:
            raise SystemExit("fused_attn: pybind11 not found; pip install pybind11") from None
        cache = BUILD_DIR / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(BUILD_DIR)  # the tree was moved or copied
        # All paths are given anew: those of the last build may have been temporary.
        run_cmake(
            *("-S", str(ROOT), "-B", str(BUILD_DIR), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *cuda_options(),
        )
        run_cmake("--build", str(BUILD_DIR))


setup(
    ext_modules=[
        Extension("fused_attn._cpu", sources=[]),
        Extension("fused_attn._cuda", sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild},
)
