"""Verdicts of `fused-attn verify`: in which classes of problems a backend is right and faster.

A verdict is of one backend on one machine as it is: GPU, driver, torch, Triton, this package and
its kernels. It lies in the user's cache folder, and is read when a choice first needs it.
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

# The files that the kernels of a backend come from, by its name: those of the backends that are
# chosen only where they were verified.
KERNELS: dict[str, Callable[[], Iterable[Path]]] = {}

BY_NAME_ONLY = "is chosen by name only, until `fused-attn verify` finds it right and faster here"
_AGAIN = "run `fused-attn verify` again"


# ---- classes ------------------------------------------------------------------------------------

# A size belongs to the first of these that is no less.
WIDTHS = (32, 64, 96, 128, 192, 256)  # head_dim, or head_dim_v where that is more; as CUDA pads
FEW_QUERIES = 16  # kernels for decoding take them
LENGTHS = (128, 512, 2048)  # of queries and keys, the longer of the two
COLUMNS = (256, 1024, 4096, 16384)
KINDS = ("none", "causal", "structured", "dense", "bias")  # MaskSpec.kind
OPTIONS = ("dropout", "softcap", "packed", "lse", "weights", "learned_bias")
NORM_FEATURES = ("plain", "residual", "dropout")

_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class ProblemClass(NamedTuple):
    """Problems that get one verdict.

    Attributes:
        op: "attention", "layer_norm" or "rms_norm".
        dtype: the name of the type, or "other".
        sizes: `attention_sizes`, or `columns_word`.
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
    """The classes that a problem belongs to: one for its mask, or for its norm, and one for each
    option. A backend is chosen where it is usable in all of them."""
    dtype = _TYPES.get(problem.dtype, "other")
    direction = "training" if problem.needs_grad else "forward"
    if isinstance(problem, NormProblem):
        op = "rms_norm" if problem.rms else "layer_norm"
        features, sizes = ["plain"], [columns_word(problem.num_columns)]
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
            lengths = [length_word(problem.seqlen_q, problem.seqlen_k)]
        sizes = [attention_sizes(head_dim, length) for length in lengths]
    if problem.dropout:
        features.append("dropout")
    return [ProblemClass(op, dtype, size, name, direction) for size in sizes for name in features]


def attention_sizes(head_dim: int, length: str) -> str:
    """`ProblemClass.sizes` of a head_dim and a `length_word`."""
    return f"D{_up_to(head_dim, WIDTHS)},{length}"


def length_word(seqlen_q: int, seqlen_k: int) -> str:
    """The class of two lengths; 0 is one that is not known."""
    if seqlen_q == 0 or seqlen_k == 0:
        return "L=0"
    if seqlen_q <= FEW_QUERIES:
        return f"Lq<={FEW_QUERIES}"
    return f"L{_up_to(max(seqlen_q, seqlen_k), LENGTHS)}"


def length_words() -> list[str]:
    """The classes of all lengths that are known."""
    longer = [*LENGTHS, LENGTHS[-1] + 1]
    return [length_word(1, 1), *[length_word(length, length) for length in longer]]


def columns_word(num_columns: int) -> str:
    """The class of a norm's columns."""
    return f"C{_up_to(num_columns, COLUMNS)}"


def _up_to(size: int, ends: Sequence[int]) -> str:
    for end in ends:
        if size <= end:
            return f"<={end}"
    return f">{ends[-1]}"


# ---- the choice ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """A verdict as the choice looks at it.

    Attributes:
        reasons: what stands against each class; empty where the backend is usable.
        general: what stands against all classes; empty where one is usable.
    """

    reasons: dict[ProblemClass, str]
    general: str


_tables: dict[tuple[str, torch.device], _Table] = {}
changes = 0  # how often this process stored or removed verdicts


def reasons_against(backend: str, problem: Problem) -> list[str]:
    """The reason why a backend is not chosen unasked for a problem; empty if it may be."""
    general = _reason(backend, problem.device)
    if general:  # no size has been looked at: torch.compile has nothing to guard
        return [general]
    for name in classes_of(problem):
        reason = _reason(backend, problem.device, *name)
        if reason:
            return [reason]
    return []


def any_usable(backend: str, device_type: str) -> bool:
    """Whether a backend is usable in any class, on any device of a type."""
    return any(not _table(backend, device).general for device in _devices(device_type))


def any_stored(device_type: str) -> bool:
    """Whether there is a verdict, whatever it is, for any backend and device of a type."""
    return any(_table(name, d).reasons for name in KERNELS for d in _devices(device_type))


def _devices(device_type: str) -> list[torch.device]:
    if device_type != "cuda":
        return [torch.device(device_type)]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _reason(backend: str, device: torch.device, *words: str) -> str:
    """The reason against a class, or without words against all of them; empty if there is none.

    Args:
        words: the fields of a ProblemClass, one by one: torch.compile passes no tuple.
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
    # torch.compile, where it traces this, takes it for true in torch 2.9.
    return torch.compiler.is_exporting()


# torch.compiler.assume_constant_result sets this, but imports all of torch._dynamo with it: while
# torch.compile traces a call, the function is called, and what it says is built in.
_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassVerdict:
    """What was found of a class.

    Attributes:
        usable: right, and faster than what is chosen otherwise.
        speedup: how many times as fast; None where it was not timed.
        found: why it is not usable, in words behind "found it"; empty if it is.
    """

    usable: bool
    speedup: float | None = None
    found: str = ""

    @property
    def rate(self) -> float:
        """The speed-up where the backend is usable, else 0."""
        return self.speedup or 0.0 if self.usable else 0.0


def folder() -> Path:
    """Where verdicts lie."""
    from platformdirs import user_cache_path  # not needed by those who have no GPU

    return user_cache_path("fused_attn", appauthor=False) / "verdicts"


def identity(backend: str, device: torch.device) -> dict[str, str]:
    """What a verdict holds for."""
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
    """Stores a verdict in place of the one that there may be; returns its file.

    Others that read meanwhile see the old one or the new one, whole.
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
    """Removes all verdicts of these backends; returns the files that were there."""
    removed = [path for name in backends for path in sorted(folder().glob(f"{name}-*"))]
    for path in removed:
        path.unlink(missing_ok=True)
    read_again()
    return removed


def read_again() -> None:
    """Lets this process forget what it read."""
    global changes
    changes += 1
    _tables.clear()


def _path(identity: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return folder() / f"{identity['backend']}-{digest[:16]}.json"


def _read(backend: str, device: torch.device) -> _Table:
    """The verdict for this machine. Of several backends that are usable the fastest is."""
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
    """What is stored for this machine, or why that cannot be used."""
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
    except Exception as error:  # whatever it is: a call has another backend to go to
        broken = " ".join(f"{type(error).__name__}: {error}".split())
        what = "verdicts" if path is None else f"the verdict in {path}"
        return f"{what} cannot be read ({broken}): {_AGAIN}"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _against(name: ProblemClass, verdict: ClassVerdict) -> str:
    return "" if verdict.usable else f"`fused-attn verify` found it {verdict.found} for {name}"


def _what_changed(own: Mapping[str, str], files: Sequence[Path]) -> str:
    """That there is no verdict, and what is other than when this GPU was last verified."""
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

_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")  # of Linux


def _gpu(device: torch.device) -> str:
    """The name of the GPU, or of the device that stands in for one."""
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
