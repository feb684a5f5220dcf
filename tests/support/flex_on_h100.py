"""Generation of FlexAttention's kernels for a simulated H100, and runs in Triton's interpreter.

Both steps run in separate processes: lower_for_h100.py and run_for_h100.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lower_for_h100 import HEURISTICS, Lowering, plain_source
from torch import Tensor

from fused_attn.backends.flex import variant_of
from fused_attn.call.attention import AttentionCall

HERE = Path(__file__).parent


def flat_tensors(call: AttentionCall, want_lse: bool = True) -> tuple[Any, list[Any]]:
    """Return the variant that a GPU would compile, and the list [query, key, value, *operands]."""
    variant, operands = variant_of(call, want_lse)
    lists = operands.lists or (None,) * 8
    return variant._replace(device_type="cuda"), [
        call.query, call.key, call.value, *lists, *operands[1:],
    ]  # fmt: skip


def lower(calls: Sequence[AttentionCall], folder: Path) -> list[Lowering]:
    """Return, for each call, the generated code that computes out and lse."""
    problems = []
    for call in calls:
        variant, tensors = flat_tensors(call)
        described = [
            None if t is None else {
                "size": tuple(t.shape), "stride": t.stride(), "dtype": t.dtype,
                "requires_grad": t.requires_grad,
            }
            for t in tensors
        ]  # fmt: skip
        problems.append({"variant": variant, "tensors": described})
    torch.save(problems, folder / "problems.pt")
    _run("lower_for_h100.py", _guard(folder), folder / "problems.pt", folder / "lowered.pt")
    # The script saved `Lowering` as a class of its __main__ module.
    sys.modules["__main__"].Lowering = Lowering  # type: ignore[attr-defined]
    return torch.load(folder / "lowered.pt", weights_only=False)


def interpret(
    lowered: Sequence[Lowering],
    problems: Sequence[tuple[list[Any], list[Tensor]]],
    folder: Path,
) -> list[list[Any]]:
    """Run generated code on CPU tensors with Triton's interpreter.

    Args:
        lowered: code of each call, as returned by `lower`.
        problems: for each call, the list from `flat_tensors`, and the gradients of out and lse.
        folder: folder for temporary files.

    Returns:
        For each call, the list [out, lse, grads], where grads maps the index of a tensor in
        `flat_tensors` to its gradient; [out, lse] if only a forward was generated.
    """
    detached = [
        ([None if t is None else t.detach() for t in tensors], grads) for tensors, grads in problems
    ]
    torch.save(list(lowered), folder / "run.pt")
    torch.save(detached, folder / "tensors.pt")
    files = [folder / name for name in ("run.pt", "tensors.pt", "results.pt")]
    _run("run_for_h100.py", *files, TRITON_INTERPRET="1")
    return torch.load(files[2], weights_only=False)


def graphs(folder: Path) -> dict[str, list[str]]:
    """Return the attention operations in each graph that compile_for_h100.py compiles."""
    return json.loads(_run("compile_for_h100.py", _guard(folder)))


def kernels_of(lowering: Lowering) -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, source and launch constants of each kernel in generated code."""
    found = []
    for code in lowering.code:
        for name, source in re.findall(
            r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL
        ):
            (options,) = HEURISTICS.findall(source)
            (signature,) = re.findall(r"'signature': (\{.*?\})", options)
            constants = dict(re.findall(r"\b(num_stages|num_warps)=(\d+)", options))
            described = {"signature": eval(signature), **{k: int(v) for k, v in constants.items()}}
            found.append((name, plain_source(source), described))
    return found


def _guard(folder: Path) -> Path:
    """Build a library that lets autograd record CUDA tensors; return its path."""
    library, root = folder / "libguard.so", Path(torch.__file__).parent
    includes = [f"-I{root / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    command = [
        "g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-w", *includes,
        f"-I{sysconfig.get_path('include')}", str(HERE / "cuda_guard.cpp"), "-o", str(library),
        f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def _run(script: str, *arguments: Path, **environment: str) -> str:
    """Run a script in this folder and return its output."""
    cache = arguments[0].parent / "inductor"
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        "TRITON_INTERPRET": "0",
        **environment,
    }
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout
