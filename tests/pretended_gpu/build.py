"""Build the simulated GPU, and the package's compiled modules for it, in build/pretended-gpu.

Run this script with the Python of that folder's environment (make_env.sh), whose torch determines
the required NVIDIA libraries and their symbols. It prints nothing unless it fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from environment import FOLDER, HERE, ROOT

CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

SOURCES = {
    "libcuda.so.1": ["driver.c", "state.c"],
    "libcudart.so.13": ["runtime.c", "launches.c", "streams.c"],
}
# Return values of the stubs of these libraries: errors. Stubs of other libraries, such as cuBLAS,
# return 0 (success), so that torch continues with meaningless values.
NOT_SUPPORTED = 801
RETURNED = {"libcuda.so.1": NOT_SUPPORTED, "libcudart.so.13": NOT_SUPPORTED, "libnvrtc.so.13": 1}
# Definitions of functions whose results torch checks.
SPECIAL = {
    "cudnnGetVersion": "unsigned long cudnnGetVersion(void) { return 91900; }",
    "cudnnGetProperty": """
int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? 9 : which == 1 ? 19 : 0;
  return 0;
}""",
    "cudnnBackendCreateDescriptor": """
int cudnnBackendCreateDescriptor(int type, void** descriptor) {
  static long all;
  *descriptor = &all;
  return 0;
}""",
    # Sets the count to 1 and the value to 0: one plan, without workspace or shared memory.
    "cudnnBackendGetAttribute": """
int cudnnBackendGetAttribute(void* descriptor, int which, int type, long asked, long* count,
                             void* values) {
  enum { kBoolean = 2, kInt64 = 3, kDescriptor = 15 };
  if (count != 0) *count = 1;
  if (asked == 0 || values == 0 || type == kBoolean || type == kDescriptor) return 0;
  __builtin_memset(values, 0, type == kInt64 ? 8 : 4);
  return 0;
}""",
    "cublasLtMatmulAlgoGetHeuristic": """
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* product, void* a, void* b, void* c, void* d,
                                   void* preference, int asked, void* results, int* returned) {
  *returned = 1;
  return 0;
}""",
}

# Library functions that launch kernels, and the definition of their stubs, which count launches.
LAUNCHING = re.compile(r"cudnnBackendExecute|cublas\w*Gemm\w*|cublasLtMatmul")
COUNTED = """
void pretended_library_call(void** kernel, const char* name);
long {name}() {{
  static void* kernel;
  pretended_library_call(&kernel, "{name}");
  return 0;
}}"""


def run(*command: str | Path) -> str:
    """Return the output of a command; if it fails, print the output and exit."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def torch_libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch")  # importing torch would need the libraries
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no torch: run make_env.sh first")
    return sorted(Path(spec.origin).parent.glob("lib/*.so"))


def prefix(library: str) -> str:
    """Return the lowercase prefix of the names of a library's symbols."""
    name = library.removeprefix("lib").split(".")[0].lower()
    return {"cudart": "cuda", "cuda": "cu", "nvshmem_host": "nvshmem"}.get(name, name)


def needed(paths: Iterable[Path]) -> dict[str, dict[str, tuple[str, bool]]]:
    """Return the version of each symbol that torch imports, by library and name.

    The version is paired with True for variables, and with False for functions.
    """
    paths = list(paths)
    dynamic = "".join(run("readelf", "-d", "-W", path) for path in paths)
    libraries = set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)\w*\.so[\w.]*)\]", dynamic))
    by_prefix = {prefix(library): library for library in libraries | set(SOURCES)}
    symbols: dict[str, dict[str, tuple[str, bool]]] = defaultdict(dict)
    for path in paths:
        table = run("readelf", "--dyn-syms", "-W", path)
        for kind, name, version in re.findall(r" (\w+) +\w+ +\w+ +UND (\w+)(?:@(\S+))?", table):
            # The longest matching prefix identifies the library: cublasLt, not cublas or cu.
            plain = name.lower().lstrip("_")
            fitting = [start for start in by_prefix if plain.startswith(start)]
            if fitting and (not version or not version.startswith(("GLIBC", "CXXABI", "GCC"))):
                library = by_prefix[max(fitting, key=len)]
                symbols[library].setdefault(name, (version, kind == "OBJECT"))
    return {library: symbols[library] for library in by_prefix.values()}


def stub(name: str, is_variable: bool, value: int) -> str:
    """Return a C definition of a symbol; it is weak, so definitions in our sources override it."""
    weak = "__attribute__((weak))"
    if name in SPECIAL:
        return SPECIAL[name]
    if LAUNCHING.fullmatch(name):
        return COUNTED.format(name=name)
    if name.endswith("String"):
        return f'const char* {weak} {name}() {{ return "of the simulated GPU"; }}'
    if is_variable:
        return f"long {name}[64] {weak};"
    return f"long {weak} {name}() {{ return {value}; }}"


def build_library(library: str, symbols: dict[str, tuple[str, bool]], folder: Path) -> None:
    """Compile a library from our sources and from weak stubs of all other symbols."""
    lines, versions = [], defaultdict(list)
    for name, (version, is_variable) in sorted(symbols.items()):
        lines.append(stub(name, is_variable, RETURNED.get(library, 0)))
        if version:
            versions[version].append(name)
    stubs, script = folder / f"{library}.stubs.c", folder / f"{library}.map"
    stubs.write_text("\n".join(lines) + "\n")
    blocks = (f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in versions.items())
    script.write_text("".join(blocks))
    objects = [folder / f"{library}.stubs.o"]
    run("gcc", "-w", "-O1", "-fPIC", "-fno-builtin", "-c", stubs, "-o", objects[0])
    for source in SOURCES.get(library, []):
        objects.append(folder / f"{source}.o")
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        run("gcc", *flags, f"-I{CUDA}/include", "-c", HERE / source, "-o", objects[-1])
    options = [f"-Wl,-soname,{library}", "-Wl,-rpath,$ORIGIN", f"-L{folder}"]
    options += [f"-Wl,--version-script={script}"] if versions else []
    links = [] if library == "libcuda.so.1" else ["-l:libcuda.so.1"]
    run("gcc", "-shared", "-o", folder / library, *options, *objects, *links, "-ldl", "-lpthread")


def build_libraries(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    libraries = needed(torch_libraries())
    # The other libraries link to libcuda.so.1.
    for library in sorted(libraries, key=lambda name: name != "libcuda.so.1"):
        build_library(library, libraries[library], folder)
    # Triton links to the driver by this name.
    link = folder / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.1")


def build_modules(folder: Path) -> None:
    """Build _cpu and _cuda for this Python and sm_90a, outside the source tree."""
    scripts = Path(sys.executable).parent
    run(
        *(scripts / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={run(sys.executable, '-m', 'pybind11', '--cmakedir').strip()}",
        "-DFUSED_ATTN_CUDA=ON",
        "-DFUSED_ATTN_CUDA_ARCHS=90a",
        f"-DCMAKE_PROJECT_fused_attn_INCLUDE={HERE / 'shared_runtime.cmake'}",
    )
    run(scripts / "cmake", "--build", folder)


if __name__ == "__main__":
    build_libraries(FOLDER / "lib")
    build_modules(FOLDER / "cmake")
