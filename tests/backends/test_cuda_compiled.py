"""nvcc compiles 16-bit attention and the other CUDA kernels without register spills."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if shutil.which("nvcc") is None or shutil.which("c++filt") is None:
    pytest.skip("reason: needs nvcc and c++filt", allow_module_level=True)
if shutil.which("cuobjdump") is None:
    pytest.importorskip("triton")  # Triton contains cuobjdump

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from cuda_report import compiled_kernels, with_launches

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"

# sm_86 and sm_89 have the instructions of sm_80.
ARCHS = ("80", "90a", "100")
_SOURCES = (CUDA / "sources.cmake").read_text()
PASSES = dict(re.findall(r"^set\(cuda_params_(\w+) (.*)\)$", _SOURCES, re.MULTILINE))
HEAD_DIMS = (64, 128)  # of most models


def compile_for(arch: str, source: Path) -> Path:
    """Compile a source for an architecture, and return the object file."""
    result = source.with_suffix(".o")
    code = f"arch=compute_{arch},code=sm_{arch}"
    command = ["nvcc", "-std=c++17", "-O3", "-DNDEBUG", "-gencode", code, "-I", str(ROOT / "csrc")]
    done = subprocess.run(
        [*command, "-c", str(source), "-o", str(result)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return result


# The kernel that needs the most registers is compiled in the quick suite, too.
MOST_REGISTERS = ("attention_bwd_dkdv", 128, "90a")


@pytest.mark.parametrize(
    ("name", "head_dim", "arch"),
    [
        pytest.param(*case, marks=[] if case == MOST_REGISTERS else [pytest.mark.thorough])
        for case in itertools.product(PASSES, HEAD_DIMS, ARCHS)
    ],
)
def test_attention_does_not_spill(name, head_dim, arch, tmp_path):
    """No kernel for 16-bit types spills registers."""
    arguments = ", ".join(f"const {p}&" for p in [*PASSES[name].split(), "GpuParams"])
    source = (CUDA / "instantiate.cu.in").read_text()
    for field, value in (("pass", name), ("head_dim", str(head_dim)), ("arguments", arguments)):
        source = source.replace(f"@{field}@", value)
    file = tmp_path / "source.cu"
    file.write_text(source)
    kernels = [k for k in compiled_kernels(compile_for(arch, file)) if k.dtype != "float32"]
    assert kernels
    assert not [(k.dtype, k.arguments, k.spilled) for k in kernels if k.spilled]


@pytest.mark.sampled("clang takes 20 s", name=["layer_norm"])
@pytest.mark.parametrize("name", ["tile_summary", "layer_norm"])
def test_other_kernels_do_not_spill(name, tmp_path):
    file = tmp_path / f"{name}.cu"
    file.write_text(f'#include "cuda/{name}.cu"\n')
    kernels = compiled_kernels(compile_for("80", file))
    assert {k.dtype for k in kernels} >= {"float32", "float16", "bfloat16"}
    assert {k.arch for k in kernels} == {"sm_80"}
    assert not [k for k in kernels if k.spilled]


# A kernel with 48 floats per thread. With two blocks, it has 32 registers per thread and spills.
SPILLING = """
namespace fused_attn {{
template <class T, int kHeadDim, bool kGeneral>
__global__ void __launch_bounds__(1024, {blocks}) toy_kernel(const T* in, T* out) {{
  T values[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) out[i * 1024 + threadIdx.x] = values[47 - i];
}}
template __global__ void toy_kernel<float, 8, true>(const float*, float*);
}}
"""


@pytest.mark.parametrize("blocks", [1, 2])
def test_report(blocks, tmp_path):
    """The report lists template arguments, registers, spills and blocks per multiprocessor."""
    file = tmp_path / "toy.cu"
    file.write_text(SPILLING.format(blocks=blocks))
    (kernel,) = compiled_kernels(compile_for("80", file))
    assert (kernel.name, kernel.dtype, kernel.arguments) == ("toy_kernel", "float32", "8, true")
    assert (kernel.arch, kernel.head_dim) == ("sm_80", 8)
    assert (kernel.spilled > 0) == (blocks == 2)
    assert kernel.registers <= 64 // blocks
    with_launches([kernel], {("toy_kernel", "float32", 8): (512, 50 << 10)})
    assert (kernel.threads, kernel.shared, kernel.blocks) == (512, 50 << 10, [2, 3][blocks - 1])
