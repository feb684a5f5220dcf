"""Report the resources of each compiled CUDA kernel, for each GPU: `make cuda-report`.

Registers and spilled bytes come from the compiled code. Threads and shared memory come from the
launches of small problems, which are recorded instead of executed, so that no GPU is needed. The
number of thread blocks per multiprocessor follows from all four.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from fused_attn import masks
from fused_attn.backends import cuda, get_backend
from fused_attn.backends.cuda.module import compiled
from fused_attn.backends.verdicts import WIDTHS
from fused_attn.call.attention import AttentionBackward, AttentionCall, AttentionOptions
from fused_attn.call.norm import NormBackward, NormCall, NormOptions
from fused_attn.masks.spec import MaskSpec, spec_of_mask
from fused_attn.tools.terminal import show_table

ELEMENTS = {"float": "float32", "Half": "float16", "BFloat16": "bfloat16"}
HEAD_DIMS = WIDTHS
COLUMNS = (64, 768, 4096, 65536)


class Multiprocessor(NamedTuple):
    """Resources that the thread blocks of a multiprocessor share: threads and shared memory.

    Shared memory is in bytes. The values are from the table of compute capabilities in the CUDA C
    programming guide. Each multiprocessor also has 65536 registers.
    """

    threads: int
    shared: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(2048, 164 << 10),
    "sm_86": Multiprocessor(1536, 100 << 10),
    "sm_89": Multiprocessor(1536, 100 << 10),
    "sm_90": Multiprocessor(2048, 228 << 10),
    "sm_90a": Multiprocessor(2048, 228 << 10),
    "sm_100": Multiprocessor(2048, 228 << 10),
}
REGISTERS = 65536
RESERVED_SHARED = 1 << 10  # bytes per thread block reserved for system use


@dataclass
class Kernel:
    """Compiled kernel for one GPU, and its resource usage.

    Attributes:
        arguments: template arguments after the dtype.
        spilled: bytes of local memory per thread.
        threads: threads per thread block; 0 if no launch of the kernel was recorded.
        shared: bytes of shared memory per thread block; 0 if no launch was recorded.
        blocks: thread blocks per multiprocessor; 0 if no launch was recorded.
    """

    name: str
    dtype: str
    arguments: str
    arch: str
    registers: int
    spilled: int
    threads: int = 0
    shared: int = 0
    blocks: int = 0

    @property
    def head_dim(self) -> int:
        """Return the first number in `arguments`, which for norms is the access width instead."""
        found = re.match(r"\d+", self.arguments)
        return int(found[0]) if found else 0


def compiled_kernels(path: Path) -> list[Kernel]:
    """Return the kernels in an object file or module, one entry per kernel and GPU."""
    listing = _output([_cuobjdump(), "--dump-resource-usage", str(path)])
    # c++filt does not demangle a name that ends in a colon, so remove the colons.
    listing = _output(["c++filt"], re.sub(r"(?m)^( Function \S+):$", r"\1", listing))
    arch, name, kernels = "", ("", "", ""), []
    for line in listing.splitlines():
        if found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r" Function (.*)", line):
            name = _parts(found[1])
        elif found := re.match(r" +REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            registers, stack, local = map(int, found.groups())
            kernels.append(Kernel(*name, arch, registers, stack + local))
    return kernels


def _parts(function: str) -> tuple[str, str, str]:
    """Return the name of a kernel, its dtype, and its other template arguments."""
    found = re.search(r"(\w+)(?:<(.*)>)?\(", function)
    if found is None:
        raise ValueError(f"what is {function!r}?")
    arguments = [a.removeprefix("fused_attn::") for a in (found[2] or "").split(", ") if a]
    dtype = ELEMENTS[arguments.pop(0)] if arguments and arguments[0] in ELEMENTS else ""
    return found[1], dtype, ", ".join(arguments)


def _output(command: list[str], text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _cuobjdump() -> str:
    """Return the path of cuobjdump: the one on PATH, or else the one that Triton contains."""
    found = shutil.which("cuobjdump")
    if found is None:
        import triton

        found = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    return found


# ---- launches -----------------------------------------------------------------------------------

Launches = dict[tuple[str, str, int], tuple[int, int]]


def launches() -> Launches:
    """Return threads and shared memory per block, by kernel, dtype and head_dim (0 for norms).

    Each value is the maximum over all recorded launches.
    """
    most: Launches = {}
    for dtype, head_dim, call in _calls():
        for name, _, threads, shared in compiled().launches_of(call):
            key = (name, str(dtype).removeprefix("torch."), head_dim)
            before = most.get(key, (0, 0))
            most[key] = max(before[0], threads), max(before[1], shared)
    return most


def _calls() -> Iterator[tuple[torch.dtype, int, Callable[[], object]]]:
    cuda.use_module(compiled())  # allow CPU tensors, because no kernel runs to read them
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim in HEAD_DIMS:
            for softcap in (0.0, 1.0):
                yield dtype, head_dim, partial(_attention, dtype, head_dim, softcap)
        for columns in COLUMNS:
            yield dtype, 0, partial(_norm, dtype, columns)


def _attention(dtype: torch.dtype, head_dim: int, softcap: float) -> None:
    batch, heads, length = 1, 2, 256
    query = torch.empty(batch, heads, length, head_dim, dtype=dtype)
    mask = masks.bias(torch.zeros(length, length))
    biased = spec_of_mask(mask, batch, heads, length, length, query.device)
    backend = get_backend("cuda")
    backend.attention_fwd(
        AttentionCall(query[:, :, :1], query, query, MaskSpec(), AttentionOptions(1.0, softcap)),
        False,
        True,
    )
    for spec in (MaskSpec(), biased):
        call = AttentionCall(query, query, query, spec, AttentionOptions(1.0, softcap))
        outputs = backend.attention_fwd(call, True, True)
        backend.attention_weights(call, outputs.lse, outputs.lse_residual, False)
        backend.attention_bwd(
            AttentionBackward(call, outputs, outputs.out, None, spec.bias is not None)
        )
        torch.use_deterministic_algorithms(True)
        backend.attention_bwd(AttentionBackward(call, outputs, outputs.out, None, False))
        torch.use_deterministic_algorithms(False)


def _norm(dtype: torch.dtype, columns: int) -> None:
    backend = get_backend("cuda")
    for width in (columns, columns + 1):  # accessed by chunks, and by single elements
        x = torch.empty(64, width, dtype=dtype)
        call = NormCall(x, None, None, None, NormOptions(1e-5, False))
        _, _, mean, rstd = backend.norm_fwd(call, True, True)
        backend.norm_bwd(NormBackward(call, mean, rstd, x, None, True, True))


def with_launches(kernels: list[Kernel], launched: Launches) -> None:
    """Set threads, shared and blocks of each kernel that was launched."""
    for kernel in kernels:
        head_dim = kernel.head_dim if kernel.name.startswith("attention") else 0
        # Some kernels have no dtype or no head_dim among their template arguments.
        whole = {
            (dtype, dim): most
            for (name, dtype, dim), most in launched.items()
            if name == kernel.name and kernel.dtype in ("", dtype)
        }
        found = whole.get((kernel.dtype, head_dim)) or max(whole.values(), default=None)
        if found is None:
            continue
        kernel.threads, kernel.shared = found
        multiprocessor = MULTIPROCESSORS[kernel.arch]
        # Registers are allocated per warp, in units of 256.
        of_warp = -(-kernel.registers * 32 // 256) * 256
        kernel.blocks = min(
            REGISTERS // (of_warp * (kernel.threads // 32)),
            multiprocessor.threads // kernel.threads,
            multiprocessor.shared // (kernel.shared + RESERVED_SHARED),
        )


# ---- report -------------------------------------------------------------------------------------


def show(kernels: list[Kernel]) -> None:
    """Print a table of kernels for each GPU; kernels that spill are marked."""
    columns = ["kernel", "type", "for", ">registers", ">spilled", ">threads", ">shared", ">blocks"]
    for arch in dict.fromkeys(k.arch for k in kernels):
        own = sorted((k for k in kernels if k.arch == arch), key=_order)
        rows = [
            [k.name, k.dtype, k.arguments, *map(str, (k.registers, k.spilled))]
            + [str(n) if k.threads else "" for n in (k.threads, k.shared, k.blocks)]
            for k in own
        ]
        bad = [i for i, kernel in enumerate(own) if kernel.spilled]
        show_table(arch, columns, rows, bad)


def _order(kernel: Kernel) -> tuple[str, str, int, str]:
    return kernel.name, kernel.dtype, kernel.head_dim, kernel.arguments


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("module", type=Path, nargs="?", help="default: the one that is imported")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON, too")
    arguments = parser.parse_args()
    path = arguments.module or Path(compiled().__file__)
    kernels = compiled_kernels(path)
    with_launches(kernels, launches())
    show(kernels)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1))
    spilling = [kernel for kernel in kernels if kernel.spilled]
    print(f"{len(kernels)} kernels, {len(spilling)} of them spill")
    return bool(spilling)


if __name__ == "__main__":
    sys.exit(main())
