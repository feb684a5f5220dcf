"""Build the compiled modules with CMake; CMakeLists.txt sets every compiler flag."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# CMake reads CXX only when it first configures a build folder, so each compiler has a separate one.
COMPILER = re.findall(r"[\w+.]+", os.environ.get("CXX", ""))
# The attribute of each tool's Python package that holds the path of its bin directory.
WHEEL_BIN_DIRS = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}
CUDA_SWITCH = {None: "OFF", "": "OFF", "0": "OFF", "1": "ON"}


def find_tool(name: str) -> str:
    """Return the path of a build tool: from its wheel, beside this Python, or on the PATH.

    The PATH comes last, because it differs between make, pip and a shell, and another CMake would
    rebuild everything. The wheel comes first, because in pip's isolated build environments the
    tools beside Python are those of the outer environment.
    """
    try:
        folder = getattr(importlib.import_module(name), WHEEL_BIN_DIRS[name], None)
    except ImportError:
        folder = None
    beside = shutil.which(name, path=sysconfig.get_path("scripts"))
    path = (folder and shutil.which(name, path=folder)) or beside or shutil.which(name)
    if path is None:
        raise SystemExit(f"fused_attn: {name} not found: pip install {name}")
    return path


def build_dir() -> Path:
    """Return the build folder, whose name contains the Python ABI, CXX and the tool versions.

    CMake versions order compiler flags differently, so another version would recompile everything,
    and ninja cannot read the build log of a newer ninja. The folder is not removed after a build,
    so that the next build compiles only changed sources.
    """
    parts = ["cmake", sysconfig.get_config_var("SOABI"), *COMPILER]
    for tool in WHEEL_BIN_DIRS:
        said = subprocess.run([find_tool(tool), "--version"], capture_output=True, text=True).stdout
        parts += [tool[0] + version for version in re.findall(r"\d+(?:\.\d+)*", said)[:1]]
    return ROOT / "build" / "-".join(parts)


def pybind11_cmake_dir() -> str:
    """Return the path of pybind11's CMake folder, through a link whose path never changes.

    The folder itself has a different path in each isolated build environment, and a changed path
    would make CMake rebuild everything.
    """
    try:
        import pybind11
    except ImportError:
        raise SystemExit("fused_attn: pybind11 not found: pip install pybind11") from None
    package, folder = Path(pybind11.__file__).parent, Path(pybind11.get_cmake_dir())
    if package not in folder.parents:
        return str(folder)
    link = ROOT / "build" / f"pybind11-{pybind11.__version__}"
    if not link.exists():
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)  # a dangling link: its environment was deleted
        link.symlink_to(package)
    return str(link / folder.relative_to(package))


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
        self.build_dir = build_dir()
        self.configure_and_build()
        if self.inplace:
            # Remove the old modules first: overwriting one would change the code of processes that
            # have mapped it.
            self.remove_modules(ROOT)
        super().run()

    def build_extensions(self) -> None:
        # CMake decides which modules are built: remove those of an earlier build, such as _cuda.
        self.remove_modules(Path(self.build_lib))
        run_cmake("--install", str(self.build_dir), "--prefix", str(Path(self.build_lib).resolve()))

    def remove_modules(self, prefix: Path) -> None:
        for extension in self.extensions:
            (prefix / self.get_ext_filename(extension.name)).unlink(missing_ok=True)

    def configure_and_build(self) -> None:
        cache = self.build_dir / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(self.build_dir)  # the source tree was moved or copied
        # Pass all paths again, because those of the last build may be in a deleted environment.
        run_cmake(
            *("-S", str(ROOT), "-B", str(self.build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_cmake_dir()}",
            *cuda_options(),
        )
        run_cmake("--build", str(self.build_dir))


class WheelWithSbom(bdist_wheel):
    """Adds an SBOM of the libraries that are compiled into the modules (PEP 770, CycloneDX 1.6)."""

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:
        super().write_wheelfile(wheelfile_base, *args)
        import pybind11

        def library(name: str, version: str, **more: str) -> dict:
            return {"type": "library", "name": name, "version": version, **more}

        def from_pypi(name: str, version: str) -> dict:
            return library(name, version, purl=f"pkg:pypi/{name}@{version}")

        compiled_in = [from_pypi("pybind11", pybind11.__version__)]
        if next(Path(self.bdist_dir).glob("fused_attn/_cuda.*.so"), None):
            nvcc = next((build_dir() / "CMakeFiles").glob("*/CMakeCUDACompiler.cmake")).read_text()
            release = re.search(r'CMAKE_CUDA_COMPILER_VERSION "(.*)"', nvcc)
            compiled_in.append(library("cudart_static", release[1] if release else "unknown"))
        metadata = self.distribution.metadata
        sbom = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": from_pypi(metadata.get_name(), metadata.get_version())},
            "components": compiled_in,
        }
        path = Path(wheelfile_base) / "sboms" / f"{metadata.get_name()}.cdx.json"
        path.parent.mkdir()
        path.write_text(json.dumps(sbom, indent=1) + "\n")


def project_urls() -> dict[str, str]:
    """Return the project URLs for PyPI, or {} if RELEASE_REPOSITORY is unset.

    Only the release build sets it; a build from the sdist elsewhere does not know the repository.
    """
    repository = os.environ.get("RELEASE_REPOSITORY")
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


setup(
    project_urls=project_urls(),
    ext_modules=[
        Extension("fused_attn._cpu", sources=[]),
        Extension("fused_attn._cuda", sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": WheelWithSbom},
)
