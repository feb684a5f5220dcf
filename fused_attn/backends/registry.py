"""Which backend computes a problem, and why the others do not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

from fused_attn.backends import cpp, cuda, reference, triton
from fused_attn.backends.problem import Problem

# In order of preference. Each has `unsupported(problem)`, whose empty list means "I take it", and
# `not_automatic()`, whose empty list means that it may be chosen unasked; eager takes everything,
# so it is last.
BACKENDS: dict[str, ModuleType] = {
    "cpp": cpp,
    "cuda": cuda,
    "triton": triton,
    "eager": reference,
}

# A plain global, not a context variable, so that torch.compile can guard on it.
_override: str | None = None


def get_backend(name: str) -> ModuleType:
    """The module of a backend.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run on this machine, in order of preference."""
    return tuple(name for name, module in BACKENDS.items() if not module.unavailable())


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
    """What `use_backend` or FUSED_ATTN_BACKEND asks for, in that order."""
    return _override or os.environ.get("FUSED_ATTN_BACKEND") or None


def select(problem: Problem, backend: str | None = None) -> str:
    """The name of the backend for a problem.

    A backend that is asked for by the `backend` argument, `use_backend` or FUSED_ATTN_BACKEND (in
    that order) is the only candidate; otherwise the first that takes the problem.

    Raises:
        NotImplementedError: no candidate takes it; the message has each one's reasons.
        ValueError: there is no backend of that name.
    """
    wanted = backend or wanted_backend()
    candidates = (wanted,) if wanted else tuple(BACKENDS)
    refusals = []
    for name in candidates:
        module = get_backend(name)
        reasons = module.unsupported(problem)
        if not wanted:
            reasons = reasons + module.not_automatic()
        if not reasons:
            return name
        refusals.append(f"{name}: {'; '.join(reasons)}")
    raise NotImplementedError(f"no backend takes {problem}: " + " | ".join(refusals))
