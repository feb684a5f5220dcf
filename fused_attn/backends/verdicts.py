"""Verdicts of `fused-attn verify`: the classes of problems where a backend is right and faster.

A verdict holds for one backend with the current GPU, driver, torch, Triton, package version and
kernels. It is stored in the user's cache folder, and read on first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused_attn.backends.problem import NormProblem, Problem
from fused_attn.version import __version__

# For each backend that is selected only where it was verified: the files of its kernels.
KERNELS: dict[str, Callable[[], Iterable[Path]]] = {}

BY_NAME_ONLY = "is chosen by name only, until `fused-attn verify` finds it right and faster here"
_AGAIN = "run `fused-attn verify` again"


# ---- classes ------------------------------------------------------------------------------------

# A size belongs to the first of these that is not smaller.
WIDTHS = (32, 64, 96, 128, 192, 256)  # max(head_dim, head_dim_v); CUDA pads to these
FEW_QUERIES = 16  # for the decode kernels
LENGTHS = (128, 512, 2048)  # max(seqlen_q, seqlen_k)
COLUMNS = (256, 1024, 4096, 16384)
KINDS = ("none", "causal", "structured", "dense", "bias")  # MaskSpec.kind
OPTIONS = ("dropout", "softcap", "packed", "lse", "weights", "learned_bias")
NORM_FEATURES = ("plain", "residual", "dropout")

_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class ProblemClass(NamedTuple):
    """Class of problems that share one verdict.

    Attributes:
        op: "attention", "layer_norm" or "rms_norm".
        dtype: the name of the dtype, or "other".
        sizes: result of `attention_sizes` or `columns_class`.
        feature: one of KINDS, OPTIONS or NORM_FEATURES.
        direction: "forward" or "training".
    """

    op: str
    dtype: str
    sizes: str
    feature: str
    direction: str

    def __str__(self) -> str:
        return " ".join(self)


def classes_of(problem: Problem) -> list[ProblemClass]:
    """Return the classes that a problem belongs to: one for its mask or norm, one for each option.

    A backend is selected only if it is usable in all of them.
    """
    dtype = _TYPES.get(problem.dtype, "other")
    direction = "training" if problem.needs_grad else "forward"
    if isinstance(problem, NormProblem):
        op = "rms_norm" if problem.rms else "layer_norm"
        features, sizes = ["plain"], [columns_class(problem.num_columns)]
        if problem.residual:
            features.append("residual")
    else:
        op, features = "attention", [problem.mask]
        if problem.softcap:
            features.append("softcap")
        if problem.packed:
            features.append("packed")
        if problem.result != "out":
            features.append(problem.result)
        if problem.learned_bias:
            features.append("learned_bias")
        head_dim = max(problem.head_dim, problem.head_dim_v)
        if _exporting():  # reading a dynamic length would specialize it
            lengths = length_words()
        else:
            lengths = [length_class(problem.seqlen_q, problem.seqlen_k)]
        sizes = [attention_sizes(head_dim, length) for length in lengths]
    if problem.dropout:
        features.append("dropout")
    return [ProblemClass(op, dtype, size, name, direction) for size in sizes for name in features]


def attention_sizes(head_dim: int, length: str) -> str:
    """Return `ProblemClass.sizes` for a head_dim and a `length_class`."""
    return f"D{_up_to(head_dim, WIDTHS)},{length}"


def length_class(seqlen_q: int, seqlen_k: int) -> str:
    """Return the class of two lengths, where 0 means unknown."""
    if seqlen_q == 0 or seqlen_k == 0:
        return "L=0"
    if seqlen_q <= FEW_QUERIES:
        return f"Lq<={FEW_QUERIES}"
    return f"L{_up_to(max(seqlen_q, seqlen_k), LENGTHS)}"


def length_words() -> list[str]:
    """Return the classes of all known lengths."""
    longer = [*LENGTHS, LENGTHS[-1] + 1]
    return [length_class(1, 1), *[length_class(length, length) for length in longer]]


def columns_class(num_columns: int) -> str:
    """Return the class of a norm's number of columns."""
    return f"C{_up_to(num_columns, COLUMNS)}"


def _up_to(size: int, ends: Sequence[int]) -> str:
    for end in ends:
        if size <= end:
            return f"<={end}"
    return f">{ends[-1]}"


# ---- selection ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """Verdict in the form that backend selection reads.

    Attributes:
        reasons: the reason against each class; empty if the backend is usable in it.
        general: the reason against all classes; empty if the backend is usable in any.
    """

    reasons: dict[ProblemClass, str]
    general: str


_tables: dict[tuple[str, torch.device], _Table] = {}
changes = 0  # how often this process stored or removed verdicts


def reasons_against(backend: str, problem: Problem) -> list[str]:
    """Return the first reason why a backend is opt-in for a problem; empty if there is none."""
    general = _reason(backend, problem.device)
    if general:  # before any size is read, so torch.compile adds no guard on one
        return [general]
    for name in classes_of(problem):
        reason = _reason(backend, problem.device, *name)
        if reason:
            return [reason]
    return []


def any_usable(backend: str, device_type: str) -> bool:
    """Return True if a backend is usable in any class, on any device of a type."""
    return any(not _table(backend, device).general for device in _devices(device_type))


def any_stored(device_type: str) -> bool:
    """Return True if any verdict, good or bad, is stored for a device of a type."""
    return any(_table(name, d).reasons for name in KERNELS for d in _devices(device_type))


def _devices(device_type: str) -> list[torch.device]:
    if device_type != "cuda":
        return [torch.device(device_type)]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _reason(backend: str, device: torch.device, *words: str) -> str:
    """Return the reason against a class, or if `words` is empty, against all; "" if none.

    Args:
        words: the fields of a ProblemClass, unpacked: torch.compile cannot pass a tuple.
    """
    table = _table(backend, device)
    if not words:
        return table.general
    name = ProblemClass(*words)
    return table.reasons.get(name, f"`fused-attn verify` did not look at {name}")


def _table(backend: str, device: torch.device) -> _Table:
    table = _tables.get((backend, device))
    if table is None:
        table = _tables[backend, device] = _read(backend, device)
    return table


def _exporting() -> bool:
    # In torch 2.9, torch.compile evaluates this to True if it traces it; see below.
    return torch.compiler.is_exporting()


# torch.compile calls the function while tracing, and treats the result as a constant.
# torch.compiler.assume_constant_result sets this too, but imports all of torch._dynamo.
_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassVerdict:
    """Verdict on one class.

    Attributes:
        usable: right, and faster than the backend that is otherwise selected.
        speedup: over that backend; None if not timed.
        found: why it is not usable, as words after "found it"; empty if it is.
    """

    usable: bool
    speedup: float | None = None
    found: str = ""

    @property
    def rate(self) -> float:
        """The speed-up if the backend is usable, else 0."""
        return self.speedup or 0.0 if self.usable else 0.0


def folder() -> Path:
    """Return the folder of the stored verdicts."""
    from platformdirs import user_cache_path  # optional without a GPU

    return user_cache_path("fused_attn", appauthor=False) / "verdicts"


def identity(backend: str, device: torch.device) -> dict[str, str]:
    """Return what a verdict is valid for: backend, GPU, driver, versions and kernels."""
    return {
        "backend": backend,
        "gpu": _gpu(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fused_attn": __version__,
        "kernels": _digest(KERNELS[backend]()),
    }


def store(identity: Mapping[str, str], classes: Mapping[ProblemClass, ClassVerdict]) -> Path:
    """Store a verdict, replacing an existing one; return its file.

    The replacement is atomic: concurrent readers read the old file or the new one.
    """
    path = _path(identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"identity": dict(identity), "classes": {str(n): asdict(c) for n, c in classes.items()}}
    handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=f"{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    read_again()
    return path


def forget(backends: Iterable[str]) -> list[Path]:
    """Remove all verdicts of these backends; return the removed files."""
    removed = [path for name in backends for path in sorted(folder().glob(f"{name}-*"))]
    for path in removed:
        path.unlink(missing_ok=True)
    read_again()
    return removed


def read_again() -> None:
    """Drop the verdicts that this process has cached."""
    global changes
    changes += 1
    _tables.clear()


def _path(identity: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return folder() / f"{identity['backend']}-{digest[:16]}.json"


def _read(backend: str, device: torch.device) -> _Table:
    """Return the verdict for this machine. In each class only the fastest backend is usable."""
    own = _load(backend, device)
    if isinstance(own, str):
        return _Table({}, own)
    reasons = {name: _against(name, verdict) for name, verdict in own.items()}
    for other in KERNELS.keys() - {backend}:
        theirs = _load(other, device)
        for name, verdict in theirs.items() if isinstance(theirs, dict) else ():
            if name in own and own[name].usable and verdict.rate > own[name].rate:
                reasons[name] = f"`fused-attn verify` found {other} faster for {name}"
    nowhere = "`fused-attn verify` found no class of problems in which it is the one to choose"
    return _Table(reasons, "" if "" in reasons.values() else nowhere)


def _load(backend: str, device: torch.device) -> dict[ProblemClass, ClassVerdict] | str:
    """Return the verdicts stored for this machine, or the reason why there are none to use."""
    path: Path | None = None
    try:
        files = sorted(folder().glob(f"{backend}-*.json"))
        if not files:
            return BY_NAME_ONLY
        own = identity(backend, device)
        path = _path(own)
        if path not in files:
            return _what_changed(own, files)
        facts = json.loads(path.read_text("utf-8"))
        if facts["identity"] != own:
            return f"the verdict in {path} is not of this machine: {_AGAIN}"
        return {
            ProblemClass(*name.split()): ClassVerdict(
                entry["usable"] is True, _number(entry["speedup"]), entry["found"]
            )
            for name, entry in facts["classes"].items()
        }
    except Exception as error:  # of any kind: the call falls back to another backend
        broken = " ".join(f"{type(error).__name__}: {error}".split())
        what = "verdicts" if path is None else f"the verdict in {path}"
        return f"{what} cannot be read ({broken}): {_AGAIN}"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _against(name: ProblemClass, verdict: ClassVerdict) -> str:
    return "" if verdict.usable else f"`fused-attn verify` found it {verdict.found} for {name}"


def _what_changed(own: Mapping[str, str], files: Sequence[Path]) -> str:
    """Return the reason for a missing verdict: what changed since this GPU was last verified."""
    for path in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            before = json.loads(path.read_text("utf-8"))["identity"]
            if before["gpu"] != own["gpu"]:
                continue
            changes = [
                "with other kernels" if name == "kernels" else f"with {name} {before[name]}"
                for name in own
                if before[name] != own[name]
            ]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        return f"was verified here {' and '.join(changes)}: {_AGAIN}"
    return BY_NAME_ONLY


# ---- the machine --------------------------------------------------------------------------------

_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")  # on Linux


def _gpu(device: torch.device) -> str:
    """Return the name of the GPU, or the device type if there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    return torch.cuda.get_device_name(device)


def _driver() -> str:
    for path in map(Path, _DRIVERS):
        if path.exists():
            return path.read_text("utf-8").partition("\n")[0].strip()
    if torch.version.cuda is not None and torch.cuda.is_available():
        latest = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        return f"for CUDA up to {latest}"
    return "none"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
