"""The choice of the backend for a problem, and the reasons against the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fused_attn.backends.base import Backend
from fused_attn.backends.cpp import CppBackend
from fused_attn.backends.cuda import CudaBackend
from fused_attn.backends.eager import EagerBackend
from fused_attn.backends.problem import Problem
from fused_attn.backends.triton import TritonBackend

# In order of preference; eager takes everything, so it is last.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (CppBackend(), CudaBackend(), TritonBackend(), EagerBackend())
}

_FIRST = next(backend for backend in BACKENDS.values() if not backend.unavailable())

# A plain global, not a context variable, so that torch.compile can guard on it.
_override: str | None = None


def get_backend(name: str) -> Backend:
    """The backend of a name.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run on this machine, in order of preference."""
    return tuple(name for name, backend in BACKENDS.items() if not backend.unavailable())


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, every call of the process that names no backend uses this one.

    Args:
        name: "cpp", "cuda", "triton" or "eager".

    Raises:
        ValueError: there is no backend of that name.

    Example:
        with fused_attn.use_backend("eager"):
            model(x)
    """
    global _override
    get_backend(name)
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


def wanted_backend() -> str | None:
    """The name that `use_backend` or FUSED_ATTN_BACKEND asks for, in that order."""
    return _override or os.environ.get("FUSED_ATTN_BACKEND") or None


def first_backend() -> Backend | None:
    """The backend that is asked first, where none is asked for by `use_backend`."""
    return _FIRST if _override is None else None


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The backend for a problem.

    A backend that is asked for by the `backend` argument, `use_backend` or FUSED_ATTN_BACKEND (in
    that order) is the only candidate; otherwise the first that takes the problem.

    Raises:
        NotImplementedError: no candidate takes it; the message has each one's reasons.
        ValueError: there is no backend of that name.
    """
    wanted = backend or wanted_backend()
    candidates = (get_backend(wanted),) if wanted else tuple(BACKENDS.values())
    refusals = []
    for candidate in candidates:
        reasons = candidate.unsupported(problem)
        if not wanted:
            reasons = reasons + candidate.not_automatic()
        if not reasons:
            return candidate
        refusals.append(f"{candidate.name}: {'; '.join(reasons)}")
    raise NotImplementedError(f"no backend takes {problem}: " + " | ".join(refusals))
