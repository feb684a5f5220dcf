"""The command `fused-attn doctor`: versions, hardware, backends and a self-check."""

from __future__ import annotations

import itertools
import os
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fused_attn.backends import (
    AttentionProblem,
    NormProblem,
    cpp,
    get_backend,
    verdicts,
    wanted_backend,
)
from fused_attn.backends.machine import version_of
from fused_attn.backends.problem import Problem
from fused_attn.backends.registry import BACKENDS, choose
from fused_attn.tools import contract
from fused_attn.tools.checks import AttentionCheck, NormCheck
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
        **{package: version_of(package) for package in OPTIONAL_PACKAGES},
    }


def machine() -> dict[str, Any]:
    """Return the CPU model, instruction set, torch's number of threads, GPUs and cuDNN version.

    No value identifies this machine.
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


def calls() -> list[dict[str, str]]:
    """Return the selected backend for each kind of call and each device type of this machine.

    Each entry has the keys "device", "call", "backend" (empty if no backend accepts the call) and
    "reason": why the preceding backend in the order of preference was not selected.
    """
    rows = []
    for device in _device_types():
        for call, problem in _kinds(torch.device(device), torch.float32):
            chosen, refused = choose(problem)
            reason = f"{refused[-1][0]}: {refused[-1][1][0]}" if refused else "first in order"
            backend = "" if chosen is None else chosen.name
            rows.append({"device": device, "call": call, "backend": backend, "reason": reason})
    return rows


def refusals() -> list[dict[str, Any]]:
    """Return the attention calls in bfloat16 that each available opt-in backend rejects.

    Each entry has the keys "backend", "device", "reason" and "calls", the kinds of calls that it
    rejects for that reason.
    """
    rows = []
    names = [name for name in verdicts.KERNELS if not BACKENDS[name].unavailable()]
    for device, name in itertools.product(_device_types(), names):
        reasons: dict[str, list[str]] = {}
        for call, problem in _kinds(torch.device(device), torch.bfloat16):
            if isinstance(problem, AttentionProblem):
                for reason in BACKENDS[name].unsupported(problem)[:1]:
                    reasons.setdefault(reason, []).append(call)
        rows += [
            {"backend": name, "device": device, "reason": reason, "calls": calls}
            for reason, calls in reasons.items()
        ]
    return rows


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _kinds(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Problem]]:
    """Return the kinds of calls, each with an example problem."""
    attention = AttentionProblem(device, dtype, 64, 64, seqlen_q=1024, seqlen_k=1024)
    norm = NormProblem(device, dtype, 1024)
    large = device.type != "cpu"
    learned = {"mask": "bias", "bias_dtype": dtype, "learned_bias": True, "needs_grad": True}
    properties: dict[str, dict[str, Any]] = {
        "attention": {},
        "attention, causal": {"mask": "causal"},
        "attention, padded": {"mask": "structured"},
        "attention, dense mask": {"mask": "dense"},
        "attention, float mask": {"mask": "bias", "bias_dtype": dtype},
        "attention, training": {"needs_grad": True},
        "attention, learned float mask": learned,
        "attention, dropout": {"dropout": True, "needs_grad": True},
        "attention, softcap": {"softcap": True},
        "attention, softcap, 1 GiB of scores": {"softcap": True, "large_scores": large},
        "attention, packed": {"mask": "structured", "packed": True},
        "attention, with lse": {"result": "lse"},
        "attention, with weights": {"result": "weights"},
    }
    return [
        *[(call, replace(attention, **changes)) for call, changes in properties.items()],
        ("layer_norm", norm),
        ("rms_norm", replace(norm, rms=True)),
        ("norm of a sum, dropout", replace(norm, residual=True, dropout=True)),
    ]


# Sizes span several tiles and are not multiples of a tile. The first queries are fully masked where
# the mask is aligned with the last key.
_QUERIES, _KEYS = "2,4/2,141,75,40", "2,4/2,75,141,40"
_SUM: dict[str, Any] = {"rows": 33, "columns": 200, "residual": True}
CASES = (
    AttentionCheck(shape=_QUERIES, mask="causal_bottom_right+padding"),
    AttentionCheck(shape=_KEYS, mask="window:50+alibi"),
    AttentionCheck(shape=_QUERIES, mask="causal_bottom_right+padding", dtype="bfloat16"),
    AttentionCheck(shape=_KEYS, mask="documents:40", bias="learned", dtype="bfloat16"),
    AttentionCheck(shape=_KEYS, mask="window:50+alibi", dtype="float16"),
    NormCheck(**_SUM),
    NormCheck(**_SUM, dtype="bfloat16"),
    NormCheck(**_SUM, rms=True, dtype="float16"),
)


def self_check(backend: str | None = None) -> list[dict[str, Any]]:
    """Check masked attention and norms in several dtypes against the reference in float64.

    Args:
        backend: the backend to check. None selects the backend that FUSED_ATTN_BACKEND names, or
            otherwise all backends that are the default for some kind of call. If any of these have
            kernels of this package, only those are checked.

    Raises:
        ValueError: no backend has this name.
    """
    wanted = backend or wanted_backend()
    chosen = {call["backend"] for call in calls()} - {""}
    kernels = {name for name in chosen if not get_backend(name).differentiable}
    names = [wanted] if wanted else sorted(kernels or chosen)
    return [_checked(case, name) for name in names for case in CASES]


def _checked(case: AttentionCheck | NormCheck, backend: str) -> dict[str, Any]:
    """Run a case on a backend, forward and backward.

    Returns:
        The case, and the result that is closest to its limit or exceeds it most ("worst"), with its
        error and its limit; or the "problem" that kept the backend from computing the case.
    """
    on_cpu = AttentionProblem(torch.device("cpu"), getattr(torch, case.dtype), 1, 1)
    device = "cuda" if get_backend(backend).unsupported(on_cpu) else "cpu"
    op = case.classes()[0].op
    row = {
        "name": case.mask if isinstance(case, AttentionCheck) else f"{op} of a sum",
        "backend": backend, "device": device, "dtype": case.dtype, "ok": False, "worst": "",
        "error": None, "limit": None, "problem": "; ".join(_unavailable(backend)),
    }  # fmt: skip
    if row["problem"]:
        return row
    try:
        worst = contract.worst(case.run(backend, device))
    except Exception as error:  # report every failure as a problem of the case
        return row | {"problem": f"{type(error).__name__}: {error}"}
    found = {"worst": worst.name, "error": worst.error, "limit": worst.limit}
    return row | {"ok": worst.ok, **found}


def diagnose(backend: str | None = None) -> dict[str, Any]:
    """Return all diagnostic facts as a dict of JSON-serializable values.

    Args:
        backend: see `self_check`.
    """
    start = time.perf_counter()
    checks = self_check(backend)
    return {
        "ok": all(check["ok"] for check in checks),
        "versions": versions(),
        "machine": machine(),
        "backends": backends(),
        "calls": calls(),
        "refusals": refusals(),
        "self_check": checks,
        "self_check_seconds": round(time.perf_counter() - start, 3),
    }


def _isa() -> str:
    """Return the instruction set in use, or the reason why there is none."""
    reasons = _unavailable("cpp")
    return f"none: {reasons[0]}" if reasons else cpp.isa()


def _unavailable(backend: str) -> list[str]:
    """Return why a backend cannot run here; for cpp, also why FUSED_ATTN_CPU_ISA is rejected."""
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
