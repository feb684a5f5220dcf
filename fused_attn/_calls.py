"""Calls that look like an earlier one: validated once, then straight to the kernel.

A call of one query and one key takes 40 microseconds with its validation, 7.5 with a plan. So a
call without gradients, mask tensors or dropout leaves a plan behind, under all that validation
depends on: shapes, strides, types and options. Whatever watches calls, or changes the choice of a
backend, keeps a call away from the plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_attn._layout import readable_in_place
from fused_attn._modes import plain_eager, statistics_dtype, transformed
from fused_attn.backends import cpp, wanted_backend

Plan = Callable[..., Tensor]

_MAX_PLANS = 1024  # then all are dropped: a program with that many shapes pays validation anyway
_plans: dict[Any, Plan] = {}


def signature(tensors: tuple[Tensor | None, ...], *options: Any) -> Any:
    """What a plan is found by; None where a call must not take one."""
    if not plain_eager(*tensors):
        return None
    grad = torch.is_grad_enabled()
    facts: list[Any] = [options]
    for tensor in tensors:
        if tensor is None:
            facts.append(None)
            continue
        if (grad and tensor.requires_grad) or not tensor.is_cpu or tensor.is_neg():
            return None
        facts += (tensor.shape, tensor.stride(), tensor.dtype)
    if transformed() or torch.is_autocast_enabled("cpu") or wanted_backend() is not None:
        return None
    return tuple(facts)


def find(key: Any) -> Plan | None:
    """The plan of an earlier call with this signature."""
    return None if key is None else _plans.get(key)


def keep(key: Any, make: Callable[..., Plan | None], *args: Any) -> None:
    """Leaves the plan make(*args) for calls with this signature."""
    if key is None:
        return
    plan = make(*args)
    if plan is None:
        return
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan


def attention_plan(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Plan | None:
    """Runs attention without a mask tensor on tensors like these; arguments as cpp.attention_fwd's,
    from spec to softcap."""
    if any(readable_in_place(tensor) is not tensor for tensor in (query, key, value)):
        return None  # would be copied
    return cpp.attention_call(query, key, value, *options)


def norm_plan(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_columns: int,
    eps: float,
    rms: bool,
) -> Plan | None:
    """Runs a norm of so many columns on tensors like these."""
    statistics = statistics_dtype(input.dtype)
    parameters = [t for t in (weight, bias) if t is not None]
    if not all(t.is_contiguous() for t in (input, *parameters)):
        return None  # would be copied
    if any(t.dtype != statistics for t in parameters):
        return None  # would be converted
    return cpp.norm_call(input.reshape(-1, num_columns), eps, rms)
