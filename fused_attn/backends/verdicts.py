"""Verdicts of `fused-attn verify`: the classes of problems where a backend is correct and faster.

A verdict is valid for one backend on one GPU, with one driver and one version of torch, Triton,
this package and its kernels. It is stored in the user's cache folder and read on first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused_attn.backends.machine import version_of
from fused_attn.backends.problem import NormProblem, Problem
from fused_attn.base.torch_state import traced_as_constant
from fused_attn.version import __version__

# Kernel files of each backend that must be verified. A verdict is valid for one hash of the files.
KERNELS: dict[str, Callable[[], Iterable[Path]]] = {}

BY_NAME_ONLY = "is opt-in until `fused-attn verify` finds it correct and faster here"
_AGAIN = "run `fused-attn verify` again"

in_verification = False  # a step of `fused-attn verify` is running, see `verifying`


@contextlib.contextmanager
def verifying() -> Iterator[None]:
    """Let backends compile any number of kernels, and refuse calls instead of falling back."""
    global in_verification
    before, in_verification = in_verification, True
    try:
        yield
    finally:
        in_verification = before


# ---- classes ------------------------------------------------------------------------------------

# Upper bounds of the size classes. Sizes above the last bound form one more class.
WIDTHS = (32, 64, 96, 128, 192, 256)  # max(head_dim, head_dim_v); CUDA kernels pad to these
FEW_QUERIES = 16  # largest seqlen_q in the class of decode kernels
LENGTHS = (128, 512, 2048)  # max(seqlen_q, seqlen_k)
COLUMNS = (256, 1024, 4096, 16384)

_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class ProblemClass(NamedTuple):
    """Class of problems that share one verdict.

    Attributes:
        op: "attention", "layer_norm" or "rms_norm".
        dtype: the name of the dtype, or "other".
        sizes: the size class, from `attention_sizes` or `columns_class`.
        feature: the mask's `MaskSpec.kind` ("plain" for norms), or an option of the call.
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
    """Return the classes of a problem: one for the mask or norm, then one for each option.

    A backend is selected only if it is usable in all these classes.
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
        if _exporting():  # reading a dynamic length would specialize the program to it
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
    """Return the length class of a problem. A length of 0 is unknown."""
    if seqlen_q == 0 or seqlen_k == 0:
        return "L=0"
    if seqlen_q <= FEW_QUERIES:
        return f"Lq<={FEW_QUERIES}"
    return f"L{_up_to(max(seqlen_q, seqlen_k), LENGTHS)}"


def length_words() -> list[str]:
    """Return all length classes, except the class of unknown lengths."""
    longer = [*LENGTHS, LENGTHS[-1] + 1]
    return [length_class(1, 1), *[length_class(length, length) for length in longer]]


def columns_class(num_columns: int) -> str:
    """Return the size class of a norm with num_columns columns."""
    return f"C{_up_to(num_columns, COLUMNS)}"


def _up_to(size: int, ends: Sequence[int]) -> str:
    for end in ends:
        if size <= end:
            return f"<={end}"
    return f">{ends[-1]}"


# ---- selection ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """Verdict on a backend, in the form that backend selection uses.

    Attributes:
        reasons: why the backend is not usable in each class; "" if it is.
        general: why the backend is not usable in any class; "" if it is usable in at least one.
    """

    reasons: dict[ProblemClass, str]
    general: str


_tables: dict[tuple[str, torch.device], _Table] = {}
changes = 0  # number of times that this process stored or removed verdicts


def reasons_against(backend: str, problem: Problem) -> list[str]:
    """Return the first reason why a backend is opt-in for a problem; empty if there is none."""
    general = _reason(backend, problem.device)
    if general:  # return before sizes are read, which adds guards in torch.compile
        return [general]
    for name in classes_of(problem):
        reason = _reason(backend, problem.device, *name)
        if reason:
            return [reason]
    return []


def found_wrong(backend: str, problem: Problem) -> bool:
    """Return True if `fused-attn verify` found a backend wrong in any class of the problem."""
    names = classes_of(problem)
    return any(_reason(backend, problem.device, *name) == _against(name, _WRONG) for name in names)


def any_usable(backend: str, device_type: str) -> bool:
    """Return True if a backend is usable in at least one class on a device of this type."""
    return any(not _table(backend, device).general for device in _devices(device_type))


def any_stored(device_type: str) -> bool:
    """Return True if a verdict, positive or negative, is stored for a device of this type."""
    return any(_table(name, d).reasons for name in KERNELS for d in _devices(device_type))


def _devices(device_type: str) -> list[torch.device]:
    if device_type != "cuda":
        return [torch.device(device_type)]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@traced_as_constant
def _reason(backend: str, device: torch.device, *words: str) -> str:
    """Return the reason against a backend in a class, or in all classes; "" if there is none.

    Args:
        words: the fields of a ProblemClass, or nothing for all classes. They are unpacked because
            torch.compile cannot pass a tuple.
    """
    table = _table(backend, device)
    if not words:
        return table.general
    name = ProblemClass(*words)
    return table.reasons.get(name, f"`fused-attn verify` did not check {name}")


def _table(backend: str, device: torch.device) -> _Table:
    table = _tables.get((backend, device))
    if table is None:
        table = _tables[backend, device] = _read(backend, device)
    return table


@traced_as_constant  # torch.compile would evaluate the call to True (torch 2.9)
def _exporting() -> bool:
    return torch.compiler.is_exporting()


# ---- files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassVerdict:
    """Verdict on one class.

    Attributes:
        usable: True if the backend is correct, and faster than the backend selected otherwise.
        speedup: the speedup over that backend; None if not timed.
        found: why the backend is not usable, worded to follow "found it"; empty if it is usable.
    """

    usable: bool
    speedup: float | None = None
    found: str = ""

    @property
    def rate(self) -> float:
        """The speedup if the backend is usable and was timed, else 0."""
        return self.speedup or 0.0 if self.usable else 0.0


def folder() -> Path:
    """Return the folder in which verdicts are stored, below the user's cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches, "fused_attn", "verdicts")


def identity(backend: str, device: torch.device) -> dict[str, str]:
    """Return the backend, GPU, driver, versions and kernel hash that a verdict is valid for."""
    return {
        "backend": backend,
        "gpu": _gpu(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": version_of("triton") or "none",
        "fused_attn": __version__,
        "kernels": _digest(KERNELS[backend]() if backend in KERNELS else []),
    }


def store(identity: Mapping[str, str], classes: Mapping[ProblemClass, ClassVerdict]) -> Path:
    """Store a verdict, replacing an existing one, and return its path.

    The file is replaced atomically. Concurrent readers read either the old or the new file.
    """
    path = _path(identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"identity": dict(identity), "classes": {str(n): asdict(c) for n, c in classes.items()}}
    with tempfile.TemporaryDirectory(dir=path.parent) as there:
        temporary = Path(there, path.name)
        temporary.write_text(json.dumps(facts, indent=1), "utf-8")
        os.replace(temporary, path)
    read_again()
    return path


def forget(backends: Iterable[str]) -> list[Path]:
    """Remove all verdicts on these backends, and return the paths of the removed files."""
    removed = [path for name in backends for path in sorted(folder().glob(f"{name}-*"))]
    for path in removed:
        path.unlink(missing_ok=True)
    read_again()
    return removed


def read_again() -> None:
    """Clear the cached verdicts, so that the next use reads the files again."""
    global changes
    changes += 1
    _tables.clear()


def _path(identity: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return folder() / f"{identity['backend']}-{digest[:16]}.json"


def _read(backend: str, device: torch.device) -> _Table:
    """Read the verdict for this machine. In each class, only the fastest backend is usable."""
    verdicts = _load(backend, device)
    if isinstance(verdicts, str):
        return _Table({}, verdicts)
    reasons = {name: _against(name, verdict) for name, verdict in verdicts.items()}
    for other in KERNELS.keys() - {backend}:
        other_verdicts = _load(other, device)
        for name, verdict in other_verdicts.items() if isinstance(other_verdicts, dict) else ():
            if name in verdicts and verdicts[name].usable and verdict.rate > verdicts[name].rate:
                reasons[name] = f"`fused-attn verify` found {other} faster for {name}"
    nowhere = "`fused-attn verify` found no class of problems for which it should be the default"
    return _Table(reasons, "" if "" in reasons.values() else nowhere)


def _load(backend: str, device: torch.device) -> dict[ProblemClass, ClassVerdict] | str:
    """Load the verdict on each class for this machine, or return the reason why none is valid."""
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
            return f"the verdict in {path} is for another machine: {_AGAIN}"
        return {
            ProblemClass(*name.split()): ClassVerdict(
                entry["usable"] is True, _number(entry["speedup"]), entry["found"]
            )
            for name, entry in facts["classes"].items()
        }
    except Exception as error:  # a broken file must not fail the call, which uses another backend
        broken = " ".join(f"{type(error).__name__}: {error}".split())
        what = "verdicts" if path is None else f"the verdict in {path}"
        return f"{what} cannot be read ({broken}): {_AGAIN}"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


WRONG = "wrong"  # `ClassVerdict.found` of a class with a failed check
_WRONG = ClassVerdict(False, None, WRONG)


def _against(name: ProblemClass, verdict: ClassVerdict) -> str:
    return "" if verdict.usable else f"`fused-attn verify` found it {verdict.found} for {name}"


def _what_changed(own: Mapping[str, str], files: Sequence[Path]) -> str:
    """Return the reason why no verdict is valid: the changes since this GPU was last verified."""
    for path in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            before = json.loads(path.read_text("utf-8"))["identity"]
            if before["gpu"] != own["gpu"]:
                continue
            changes = [
                "with different kernels" if name == "kernels" else f"with {name} {before[name]}"
                for name in own
                if before[name] != own[name]
            ]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        return f"was verified here {' and '.join(changes)}: {_AGAIN}"
    return BY_NAME_ONLY


# ---- the machine --------------------------------------------------------------------------------

_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")  # Linux only


def _gpu(device: torch.device) -> str:
    """Return the name of the GPU, or the device type if there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    return torch.cuda.get_device_name(device)


def _driver() -> str:
    for path in map(Path, _DRIVERS):
        if path.exists():
            return path.read_text("utf-8").partition("\n")[0].strip()
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"for CUDA up to {version.value}"
    except (OSError, AttributeError):  # no NVIDIA driver
        pass
    return "none"


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
