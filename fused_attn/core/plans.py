"""Calls that look like an earlier one: validated once, then straight to the kernel.

Validation takes 40 microseconds, normalising a mask another 40, a small kernel 2. So a call leaves
a plan behind, under all that these depend on: shapes, strides, types and options. Whatever watches
calls, or changes the choice of a backend, keeps a call away from the plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import wanted_backend
from fused_attn.core.torch_state import captured, plain_eager, stream_of, transformed
from fused_attn.masks import Mask

Plan = Callable[..., Any]

_MAX_PLANS = 1024  # then all are dropped: a program with that many shapes pays validation anyway
_MAX_PLANS_OF_MASK = 16
_plans: dict[Any, Plan] = {}

# Backends whose calls have plans: the one that is chosen unasked, and one that has to be asked for.
# What else is asked for by name is asked for in order to compare, or to check.
_PLANNED = (None, "cuda")

# Options that are what they are: a tensor could change, and many others have no hash.
_PLAIN = frozenset({bool, int, float, str, type, type(None)})


def signature(tensors: tuple[Tensor | None, ...], backend: str | None, *options: Any) -> Any:
    """What a plan is found by; None where a call must not take one."""
    if not plain_eager(*tensors) or not _PLAIN.issuperset(map(type, options)):
        return None
    backend = backend or wanted_backend()
    if backend not in _PLANNED:
        return None
    grad, needs_grad = torch.is_grad_enabled(), False
    facts: list[Any] = [backend, options]
    on_gpu = False
    for tensor in tensors:
        if tensor is None:
            facts.append(None)
            continue
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        if not tensor.is_cpu:
            if not tensor.is_cuda:
                return None
            on_gpu = True
            facts += (tensor.device, stream_of(tensor.device))
        needs_grad = needs_grad or (grad and tensor.requires_grad)
        facts += (tensor.shape, tensor.stride(), tensor.dtype)
    if transformed() or torch.is_autocast_enabled("cuda" if on_gpu else "cpu"):
        return None
    return (*facts, torch.is_inference_mode_enabled(), needs_grad)


def needs_grad(key: Any) -> bool:
    """Whether a call with this signature is differentiated."""
    return key[-1]


def find(key: Any, mask: Mask | None = None) -> Plan | None:
    """The plan of an earlier call with this signature, and this mask as it is now."""
    if key is None:
        return None
    if mask is None:
        return _plans.get(key)
    kept = None if captured(*mask.tensors()) else mask.plans.get(key)
    return kept[1] if kept is not None and kept[0] == mask.versions() else None


def keep(key: Any, mask: Mask | None, make: Callable[..., Plan | None], *args: Any) -> None:
    """Leaves the plan make(*args) for calls with this signature, and this mask."""
    if key is None:
        return
    tensors = [] if mask is None else mask.tensors()
    if not plain_eager(*tensors) or any(t.requires_grad or t.is_inference() for t in tensors):
        return
    if captured(*tensors):
        return
    plan = make(*args)
    if plan is None:
        return
    plans: dict[Any, Any] = _plans if mask is None else mask.plans
    if len(plans) >= (_MAX_PLANS if mask is None else _MAX_PLANS_OF_MASK):
        plans.clear()
    plans[key] = plan if mask is None else (mask.versions(), plan)
