"""Ahead-of-time compilation of a call's Triton kernels for a GPU that is not present.

Tests make ordinary calls of the package on CPU tensors. Each kernel that a call would launch is
compiled with the arguments and the config that it would use on that GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from fused_attn.backends.triton import (
    attention,
    backward,
    bias_grad,
    decode,
    forward,
    norm_host,
    weights,
)
from fused_attn.backends.triton.launch import Arch

# Maximum shared memory per program in bytes. Sources: CUDA C programming guide, table of compute
# capabilities; CDNA3 ISA guide, local data share.
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
ARCHS = tuple(SHARED_LIMITS)
_CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")


@dataclass(frozen=True)
class Compiled:
    """Compiled kernel and its resource usage.

    Attributes:
        text: PTX, or assembly for AMD GPUs.
        rows: rows of a score tile in its MMAs: queries, or keys in the dK/dV kernel; 0 for norms.
        spilled: bytes of register spills per thread.
        shared: bytes of shared memory per program.
        hash: hash of the compiled kernel; equal kernels have equal hashes.
    """

    name: str
    text: str
    rows: int
    spilled: int
    shared: int
    hash: str


@triton.jit
def _hides_no_values(mask):  # type: ignore[no-untyped-def]
    """Return False, to omit the pass that recomputes tiles with NaN, which may spill registers."""
    return False


class _Driver:
    """Triton driver that implements only the methods which the compiler calls."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def _forget_sources() -> None:
    """Forget the hashes of kernel sources, which are keys of Triton's cache, after a patch."""
    for module in (attention, backward, bias_grad, decode, forward, weights):
        for function in vars(module).values():
            if isinstance(function, triton.JITFunction):
                function.hash = None


@contextlib.contextmanager
def compiling_for(arch: str, nan_pass: bool = False) -> Iterator[list[Compiled]]:
    """Compile the kernels that Triton backend calls would launch within the block.

    Yields a list, to which each launch appends the compiled kernel.

    Args:
        nan_pass: also compile the pass that recomputes tiles with NaN, which may spill registers.
    """
    target = (
        GPUTarget("hip", arch, 64)
        if arch.startswith("gfx")
        else GPUTarget("cuda", int(arch[3:]), 32)
    )
    done: list[Compiled] = []

    def launch(kernel: Any, device: torch.device, grid: Any, *args: Any, **meta: Any) -> None:
        kernel.device_caches.clear()  # may contain kernels for another target
        compiled = kernel.warmup(*args, grid=grid, **meta)
        const = meta.get("const")
        rows = 0 if const is None else const.BLOCK_N if "dkdv" in kernel.__name__ else const.BLOCK_M
        done.append(_describe(kernel.__name__, int(rows), compiled))

    modules: tuple[ModuleType, ...] = (attention, norm_host)
    with contextlib.ExitStack() as stack:
        _forget_sources()
        stack.callback(_forget_sources)
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(target)))
        for module in () if nan_pass else (forward, backward):
            stack.enter_context(mock.patch.object(module, "hides_values", _hides_no_values))
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", launch))
            stack.enter_context(mock.patch.object(module, "arch_of", return_value=Arch(arch, 132)))
        yield done


def compile_source(name: str, source: str, options: dict[str, Any], arch: str) -> Compiled:
    """Compile a kernel that Inductor generated.

    Args:
        source: a module with the kernel, without Inductor's decorators.
        options: "signature", the types of the arguments; "num_warps" and "num_stages".
    """
    target = GPUTarget("cuda", int(arch[3:]), 32)
    signature = options["signature"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"{name}.py")
        with open(path, "w") as file:
            file.write(source)
        names = runpy.run_path(path)
        with mock.patch.object(driver, "_active", _Driver(target)):
            # Inductor would tune the block sizes of elementwise kernels. Use 256 instead.
            blocks = {k: 256 for k, kind in signature.items() if kind == "constexpr"}
            made = triton.compile(
                ASTSource(names[name], signature, blocks),
                target=target,
                options={k: v for k, v in options.items() if k != "signature"},
            )
    return _describe(name, 0, made)


def _describe(name: str, rows: int, kernel: Any) -> Compiled:
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        text, fields = kernel.asm["ptx"], (r"STACK:(\d+)", r"LOCAL:(\d+)")
    else:
        text = usage = kernel.asm["amdgcn"]
        fields = (r"\.private_segment_fixed_size: *(\d+)",)
    found = [re.search(field, usage) for field in fields]
    spilled = sum(int(match[1]) for match in found if match)
    assert all(found), f"no resource usage of {name}"
    return Compiled(name, text, rows, spilled, kernel.metadata.shared, kernel.hash)
