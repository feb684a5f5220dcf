"""The choice of the backend for a problem, and the reasons against the others."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from fused_attn.backends import verdicts
from fused_attn.backends.base import Backend
from fused_attn.backends.cpp import CppBackend
from fused_attn.backends.cuda import CudaBackend
from fused_attn.backends.eager import EagerBackend
from fused_attn.backends.problem import NormProblem, Problem, plain_problem
from fused_attn.backends.sdpa import SdpaBackend
from fused_attn.backends.triton import TritonBackend
from fused_attn.base.torch_state import learns
from fused_attn.masks import Mask

# In order of preference; eager takes everything, so it is last.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (CppBackend(), CudaBackend(), TritonBackend(), SdpaBackend(), EagerBackend())
}

_VARIABLE = "FUSED_ATTN_BACKEND"

# A plain global, not a context variable, so that torch.compile can guard on it.
_override: str | None = None


def get_backend(name: str, argument: str = "backend") -> Backend:
    """The backend of a name.

    Args:
        argument: where the name is from, for the message.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"{argument} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run on this machine, in order of preference."""
    return tuple(name for name, backend in BACKENDS.items() if not backend.unavailable())


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, every call of the process that names no backend uses this one.

    Args:
        name: "cpp", "cuda", "triton", "sdpa" or "eager".

    Raises:
        ValueError: there is no backend of that name.

    Example:
        >>> query, key, value = (torch.randn(2, 8, 10, 64) for _ in range(3))
        >>> with fused_attn.use_backend("eager"):
        ...     out = fused_attn.scaled_dot_product_attention(query, key, value)
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
    return _override or os.environ.get(_VARIABLE) or None


def first_backend(device: torch.device) -> Backend | None:
    """The backend that may compute a call on a device at once, without `select`: BY_PROBLEM where
    the choice depends on the problem."""
    first = _first_on(device, verdicts.changes) if _override is None else None
    # Our CPU module looks at the environment itself, in a tenth of the time.
    if type(first) is CppBackend:
        return first
    wanted = wanted_backend()
    return first if wanted is None else BACKENDS.get(wanted)


@functools.cache
def _first_on(device: torch.device, changes: int) -> Backend | None:
    """The first backend, if what it computes at once is its own on such devices.

    Args:
        changes: `verdicts.changes`, as verdicts decide too.
    """
    for backend in BACKENDS.values():
        if backend.asked_first(device.type):
            _notify(backend, device.type)
            return backend
        if backend.chosen_for_some(device.type):
            return BY_PROBLEM
    return None


class _ByProblem(Backend):
    """Hands a call to the backend that is chosen for its problem, if that is asked first."""

    name = "by problem"

    def attention_at_once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | Mask | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor | None:
        args = (query, key, value, attn_mask, dropout_p, is_causal)
        problem = plain_problem(*args)
        chosen = None if problem is None else _chosen(problem, verdicts.changes)
        return None if chosen is None else chosen.attention_at_once(*args, scale, enable_gqa)

    def norm_at_once(
        self,
        input: Tensor,
        shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        rms: bool,
        with_total: bool,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        args = (input, shape, weight, bias, residual)
        problem = NormProblem(
            input.device,
            input.dtype,
            math.prod(shape),
            rms,
            residual is not None,
            learns=any(learns(t) for t in (input, weight, bias, residual)),
        )
        chosen = _chosen(problem, verdicts.changes)
        return None if chosen is None else chosen.norm_at_once(*args, eps, rms, with_total)


BY_PROBLEM = _ByProblem()


@functools.lru_cache(maxsize=4096)
def _chosen(problem: Problem, changes: int) -> Backend | None:
    chosen = choose(problem)[0]
    first = chosen is not None and chosen.asked_first(problem.device.type)
    return chosen if first else None


def _notify(backend: Backend, device_type: str) -> None:
    """Warns, once in a process, of a choice that users should know of, unless they verified."""
    if torch.compiler.is_compiling() or (backend.name, device_type) in _notified:
        return
    _notified.add((backend.name, device_type))
    notice = backend.notice(device_type)
    if notice is not None and not verdicts.any_stored(device_type):
        warnings.warn(notice, stacklevel=2)


_notified: set[tuple[str, str]] = set()

Refusals = list[tuple[str, list[str]]]  # names of backends, with their reasons


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The backend for a problem.

    A backend that is asked for by the `backend` argument, `use_backend` or FUSED_ATTN_BACKEND (in
    that order) is the only candidate; otherwise the first that takes the problem.

    Raises:
        NotImplementedError: no candidate takes it; the message has each one's reasons.
        ValueError: there is no backend of that name.
    """
    chosen, refusals = choose(problem, backend)
    if chosen is None:
        reasons = " | ".join(f"{name}: {'; '.join(against)}" for name, against in refusals)
        if _source_of(backend) == _VARIABLE:
            reasons += f" ({_VARIABLE}={wanted_backend()} allows no other)"
        raise NotImplementedError(f"no backend takes {problem}: {reasons}")
    if not (backend or wanted_backend()):
        _notify(chosen, problem.device.type)
    return chosen


def _source_of(backend: str | None) -> str:
    """What names the only candidate, where one does: an argument, or the environment variable."""
    by_argument = backend or _override or not os.environ.get(_VARIABLE)
    return "backend" if by_argument else _VARIABLE


def choose(problem: Problem, backend: str | None = None) -> tuple[Backend | None, Refusals]:
    """The backend of `select`, or None, and what those before it have against the problem."""
    wanted = backend or wanted_backend()
    source = _source_of(backend)
    candidates = (get_backend(wanted, source),) if wanted else tuple(BACKENDS.values())
    refusals: Refusals = []
    for candidate in candidates:
        reasons = candidate.unsupported(problem)
        if not wanted:
            reasons = reasons + candidate.not_automatic(problem)
        if not reasons:
            return candidate, refusals
        refusals.append((candidate.name, reasons))
    return None, refusals
