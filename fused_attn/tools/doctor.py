"""The command `fused-attn doctor`: versions, hardware, backends and a self-check."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.backends import (
    AttentionProblem,
    cpp,
    get_backend,
    wanted_backend,
)
from fused_attn.backends.registry import BACKENDS
from fused_attn.functional import layer_norm, rms_norm, scaled_dot_product_attention
from fused_attn.masks import Mask
from fused_attn.tools import contract
from fused_attn.tools.cases import Shape, make_mask
from fused_attn.tools.choices import Choice, Refusal, choices, device_types
from fused_attn.tools.choices import refusals as rejected
from fused_attn.version import __version__

# fused_attn uses these packages if they are installed.
OPTIONAL_PACKAGES = (
    "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "transformers", "timm", "matplotlib",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Return versions by package; None for an optional package that is not installed."""
    return {
        "fused_attn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in OPTIONAL_PACKAGES},
    }


def machine() -> dict[str, Any]:
    """Return the CPU model, instruction set, torch's number of threads, GPUs and cuDNN version.

    No value is unique to this machine.
    """
    return {
        "cpu": cpu_model(),
        "isa": _isa(),
        "FUSED_ATTN_CPU_ISA": os.environ.get("FUSED_ATTN_CPU_ISA") or None,
        "threads": torch.get_num_threads(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
    }


def cpu_model() -> str:
    """Return the CPU's model name, with its family and model if the name has no digits."""
    listing = Path("/proc/cpuinfo")  # has model names on x86 Linux only
    first = listing.read_text().split("\n\n")[0] if listing.exists() else ""
    fields = dict(re.findall(r"(?m)^(.+?)\s*:\s*(.+)$", first))
    if name := fields.get("model name"):
        number = f" (family {fields.get('cpu family')}, model {fields.get('model')})"
        return name if re.search(r"\d", name) else name + number
    return platform.processor() or platform.machine()


def backends() -> list[dict[str, Any]]:
    """Return each backend, in order of preference, and the reasons why it is unavailable here."""
    return [
        {"name": name, "available": not reasons, "reasons": reasons}
        for name, reasons in ((name, _unavailable(name)) for name in BACKENDS)
    ]


def calls() -> list[Choice]:
    """Return the selected backend for each kind of call and each device type of this machine."""
    return [choice for device_type in device_types() for choice in choices(device_type)]


def refusals() -> list[Refusal]:
    """Return what the opt-in backends reject on each device type, with the reasons."""
    return [row for device_type in device_types() for row in rejected(device_type)]


# ---- self-check ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelfCheck:
    """Result of a small case that ran forward and backward on a backend.

    Attributes:
        worst: name of the result that is closest to its limit, or exceeds it most.
        error, limit: error of `worst`, and the error that the contract allows.
        problem: why the backend did not compute the case; empty if it did.
    """

    name: str
    backend: str
    device: str
    dtype: str
    ok: bool
    worst: str = ""
    error: float | None = None
    limit: float | None = None
    problem: str = ""


def self_check(backend: str | None = None) -> list[SelfCheck]:
    """Check masked attention and norms in several dtypes against the reference in float64.

    Args:
        backend: the backend to check. None selects the backend that FUSED_ATTN_BACKEND names, or
            otherwise all backends that are the default for some kind of call. If any of these have
            kernels of this package, only those are checked.

    Raises:
        ValueError: no backend has this name.
    """
    wanted = backend or wanted_backend()
    chosen = {choice.backend for choice in calls()}
    kernels = {name for name in chosen if name and not get_backend(name).differentiable}
    names = [wanted] if wanted else sorted(kernels or chosen - {""})
    return [_checked(case, name) for name in names for case in _cases()]


@dataclass(frozen=True)
class _Case:
    name: str
    dtype: torch.dtype
    operands: dict[str, Tensor]
    call: Callable[..., Any]


def _cases() -> list[_Case]:
    """Return the cases. Sizes span several tiles and are not multiples of a tile."""
    shape = Shape(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=75, seqlen_k=141, head_dim=40
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    qkv = shape.operands(torch.float32)
    tokens = {"input": random(33, 200), "weight": random(200), "residual": random(33, 200)}
    # The second sequence is fully masked.
    causal = masks.causal() & masks.padding([shape.seqlen_k, 0])
    window = masks.sliding_window(50, align="bottom_right") & _named("alibi", shape)
    documents = _named("documents:40", shape)
    qkv_bias = qkv | {"bias": random(shape.num_heads, shape.seqlen_q, shape.seqlen_k)}
    listed = [
        ("causal, padding", "float32", qkv, _attention(causal)),
        ("window, alibi", "float32", qkv, _attention(window)),
        ("causal, padding", "bfloat16", qkv, _attention(causal)),
        ("documents, learned bias", "bfloat16", qkv_bias, _attention(documents)),
        ("window, alibi", "float16", qkv, _attention(window)),
        ("layer_norm of a sum", "float32", tokens, _norm(layer_norm)),
        ("layer_norm of a sum", "bfloat16", tokens, _norm(layer_norm)),
        ("rms_norm of a sum", "float16", tokens, _norm(rms_norm)),
    ]
    cases = []
    for name, dtype_name, operands, call in listed:
        dtype = getattr(torch, dtype_name)
        cases.append(_Case(name, dtype, {n: t.to(dtype) for n, t in operands.items()}, call))
    return cases


def _named(text: str, shape: Shape) -> Mask:
    mask = make_mask(text, shape)
    assert mask is not None
    return mask


def _attention(mask: Mask) -> Callable[..., Any]:
    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Any:
        whole = mask.to(query.device)
        if bias is not None:
            whole = whole & masks.bias(bias)
        return scaled_dot_product_attention(query, key, value, whole, enable_gqa=True)

    return call


def _norm(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Tensor, weight: Tensor, residual: Tensor) -> Any:
        return function(input, input.shape[1], weight, residual=residual)

    return call


def _checked(case: _Case, backend: str) -> SelfCheck:
    on_cpu = AttentionProblem(torch.device("cpu"), case.dtype, 1, 1)
    device = "cuda" if get_backend(backend).unsupported(on_cpu) else "cpu"
    row = functools.partial(
        SelfCheck, case.name, backend, device, str(case.dtype).removeprefix("torch.")
    )
    unavailable = _unavailable(backend)
    if unavailable:
        return row(False, problem="; ".join(unavailable))
    operands = {name: tensor.to(device) for name, tensor in case.operands.items()}

    try:
        verdict = contract.check(
            contract.by(backend, case.call), contract.by("eager", case.call), operands,
            case.dtype, True,
        )  # fmt: skip
    except Exception as error:  # report every failure as a problem of the case
        return row(False, problem=f"{type(error).__name__}: {error}")
    worst = verdict.worst
    return row(verdict.ok, worst.name, worst.error, worst.limit)


def diagnose(backend: str | None = None) -> dict[str, Any]:
    """Return all diagnostic facts as a dict of JSON-serializable values.

    Args:
        backend: see `self_check`.
    """
    start = time.perf_counter()
    checks = self_check(backend)
    return {
        "ok": all(check.ok for check in checks),
        "versions": versions(),
        "machine": machine(),
        "backends": backends(),
        "calls": [dataclasses.asdict(choice) for choice in calls()],
        "refusals": [dataclasses.asdict(refusal) for refusal in refusals()],
        "self_check": [dataclasses.asdict(check) for check in checks],
        "self_check_seconds": round(time.perf_counter() - start, 3),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _isa() -> str:
    """Return the instruction set in use, or the reason why there is none."""
    reasons = _unavailable("cpp")
    return f"none: {reasons[0]}" if reasons else cpp.isa()


def _unavailable(backend: str) -> list[str]:
    """Return why a backend cannot run here; of cpp, also if FUSED_ATTN_CPU_ISA is unsupported."""
    reasons = get_backend(backend).unavailable()
    if backend == "cpp" and not reasons:
        try:
            cpp.isa()
        except ValueError as error:
            return [str(error)]
    return reasons


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
    }
