"""Selection of the backend for a problem, and the reasons for rejecting the others."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator

import torch

from fused_attn.backends import verdicts
from fused_attn.backends.base import Backend
from fused_attn.backends.cpp import CppBackend, environment
from fused_attn.backends.cuda import CudaBackend
from fused_attn.backends.eager import EagerBackend
from fused_attn.backends.flash import FlashBackend
from fused_attn.backends.flex import FlexBackend
from fused_attn.backends.flex.flash import FlexFlashBackend
from fused_attn.backends.problem import NormProblem, Problem, problem_of
from fused_attn.backends.sdpa import SdpaBackend
from fused_attn.backends.triton import TritonBackend
from fused_attn.base.torch_state import is_compiling
from fused_attn.call.attention import UncheckedAttention
from fused_attn.call.norm import UncheckedNorm

# In order of preference. eager supports every problem, so it is last.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        CppBackend(),
        CudaBackend(),
        TritonBackend(),
        FlashBackend(),
        FlexFlashBackend(),
        FlexBackend(),
        SdpaBackend(),
        EagerBackend(),
    )
}

_VARIABLE = "FUSED_ATTN_BACKEND"

# A plain global, not a context variable, so that torch.compile can guard on it.
_override: str | None = None
_blocks: dict[object, str] = {}  # open blocks of `use_backend`; threads may close them in any order


def get_backend(name: str, argument: str = "backend") -> Backend:
    """Return the backend with a given name.

    Args:
        argument: the argument or variable that the name comes from, for the error message.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"{argument} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that run on this machine, in order of preference."""
    return tuple(name for name, backend in BACKENDS.items() if not backend.unavailable())


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Select a backend within the block for all calls that do not name one.

    The selection is process-wide, so it also applies to calls on other threads.

    Args:
        name: "cpp", "cuda", "triton", "flash", "flex_flash", "flex", "sdpa" or "eager".

    Raises:
        ValueError: no backend has that name.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> with fused_attn.use_backend("eager"):
        ...     out = fused_attn.scaled_dot_product_attention(query, key, value)
    """
    global _override
    get_backend(name)
    block = object()
    _blocks[block] = _override = name
    try:
        yield
    finally:
        del _blocks[block]
        _override = [None, *_blocks.values()][-1]


def wanted_backend(compiling: bool | None = None) -> str | None:
    """Return the name set by `use_backend`, else the one in FUSED_ATTN_BACKEND, else None.

    Args:
        compiling: is_compiling(), if the caller knows it.
    """
    if is_compiling() if compiling is None else compiling:
        # `environment` is faster, but Dynamo cannot trace it.
        return _override or os.environ.get(_VARIABLE) or None
    return _override or environment(_VARIABLE) or None


def default_backend(device: torch.device) -> Backend | None:
    """Return the backend for all calls on a device that do not name one.

    Returns None if the choice depends on the problem.
    """
    compiling = is_compiling()
    wanted = wanted_backend(compiling)
    if wanted is not None:
        return BACKENDS.get(wanted)
    # Dynamo warns about functools.cache, so it traces the uncached function.
    first_on = _first_on.__wrapped__ if compiling else _first_on
    return first_on(device, verdicts.changes)


def default_with(method: str, device: torch.device) -> Backend | None:
    """Return the default backend of a device, if it implements an optional method of `Backend`."""
    backend = default_backend(device)
    if backend is None or getattr(type(backend), method) is getattr(Backend, method):
        return None
    return backend


@functools.cache
def _first_on(device: torch.device, changes: int) -> Backend | None:
    """Return the default backend of a device, or None if the choice depends on the problem.

    Args:
        changes: `verdicts.changes`. It is part of the cache key because verdicts affect the result.
    """
    for backend in BACKENDS.values():
        extent = backend.default_for(device.type)
        if extent == "all":
            _notify(backend, device.type)
            return backend
        if extent == "some":
            return None
    return None


def backend_for_unchecked(
    call: UncheckedAttention | UncheckedNorm, device: torch.device, named: str | None
) -> Backend | None:
    """Return the backend to try on an unvalidated call; None if it must be validated first.

    Args:
        call: an unvalidated call whose `prepare` returned True.
        device: the device of the tensors of the call.
        named: the backend name that the caller passed, or None.
    """
    wanted = named or _override or environment(_VARIABLE)  # not reached under torch.compile
    if wanted:
        backend = BACKENDS.get(wanted)
    else:
        backend = _first_on(device, verdicts.changes)
        if backend is None and call.resolve():
            backend = choose(problem_of(call.assume_checked()))[0]
    return backend if backend is not None and backend.accepts_unchecked else None


Refusals = list[tuple[str, list[str]]]  # pairs of a backend name and its reasons


def select(problem: Problem, backend: str | None = None) -> Backend:
    """Select the backend for a problem.

    A backend named by the `backend` argument, `use_backend` or FUSED_ATTN_BACKEND (in that order)
    is the only candidate. Otherwise the first backend that supports the problem and is not opt-in
    for it is selected.

    Raises:
        NotImplementedError: no candidate supports the problem. The message lists their reasons.
        ValueError: no backend has that name.
    """
    chosen, refusals = choose(problem, backend)
    if chosen is None:
        reasons = " | ".join(f"{name}: {'; '.join(against)}" for name, against in refusals)
        if not backend and not _override and wanted_backend():
            reasons += f" ({_VARIABLE}={wanted_backend()} rules out all others)"
        raise NotImplementedError(f"no backend supports {problem}: {reasons}")
    if not (backend or wanted_backend()):
        _notify(chosen, problem.device.type)
    return chosen


def choose(problem: Problem, backend: str | None = None) -> tuple[Backend | None, Refusals]:
    """Return the backend that `select` chooses, or None, and the reasons against the others.

    Without a wanted backend, the results are cached and must not be modified.
    """
    wanted = backend or wanted_backend()
    if wanted:
        argument = "backend" if backend or _override else _VARIABLE
        candidate = get_backend(wanted, argument)
        against = candidate.unsupported(problem)
        return (None, [(wanted, against)]) if against else (candidate, [])
    settings = verdicts.changes, torch.are_deterministic_algorithms_enabled()
    if is_compiling():
        if isinstance(problem, NormProblem) and not problem.dropout:
            return BACKENDS["sdpa"], []  # Inductor fuses torch's norm with adjacent operations
        return _first_for.__wrapped__(problem, *settings)  # Dynamo warns about functools.lru_cache
    try:
        return _first_for(problem, *settings)
    except TypeError:  # symbolic sizes have no hash
        return _first_for.__wrapped__(problem, *settings)


@functools.lru_cache(maxsize=4096)
def _first_for(
    problem: Problem, changes: int, deterministic: bool
) -> tuple[Backend | None, Refusals]:
    """Implement `choose` without a wanted backend. The settings only extend the cache key."""
    refusals: Refusals = []
    for candidate in BACKENDS.values():
        reasons = candidate.unsupported(problem) + candidate.opt_in_reasons(problem)
        if not reasons:
            return candidate, refusals
        refusals.append((candidate.name, reasons))
    return None, refusals


def _notify(backend: Backend, device_type: str) -> None:
    """Emit the fallback warning of a backend once per process, unless verdicts are stored."""
    if is_compiling() or (backend.name, device_type) in _notified:
        return
    _notified.add((backend.name, device_type))
    warning = backend.fallback_warning(device_type)
    if warning is not None and not verdicts.any_stored(device_type):
        warnings.warn(warning, stacklevel=2)


_notified: set[tuple[str, str]] = set()
