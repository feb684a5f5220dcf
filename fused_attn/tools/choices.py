"""Backends that calls are dispatched to on this machine, by device and kind of call, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_attn.backends import AttentionProblem, NormProblem, verdicts
from fused_attn.backends.problem import Problem
from fused_attn.backends.registry import BACKENDS, choose


@dataclass(frozen=True)
class Choice:
    """Backend that a kind of call is dispatched to.

    Attributes:
        device: device type.
        call: description of the kind of call.
        backend: name of the backend; empty if no backend accepts the call.
        reason: why the preceding backend in the order of preference was not selected; "first in
            order" if there is none.
    """

    device: str
    call: str
    backend: str
    reason: str


def device_types() -> list[str]:
    """Return the device types of this machine: "cpu", and torch's accelerator if it has one."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def choices(device_type: str, dtype: torch.dtype = torch.float32) -> list[Choice]:
    """Return the selected backend for each kind of call on a device."""
    rows = []
    for name, problem in _kinds(torch.device(device_type), dtype):
        chosen, refusals = choose(problem)
        reason = f"{refusals[-1][0]}: {refusals[-1][1][0]}" if refusals else "first in order"
        rows.append(Choice(device_type, name, "" if chosen is None else chosen.name, reason))
    return rows


@dataclass(frozen=True)
class Refusal:
    """The kinds of calls that an opt-in backend rejects on a device for the same reason.

    Attributes:
        calls: descriptions of the kinds of calls.
    """

    backend: str
    device: str
    reason: str
    calls: list[str]


def refusals(device_type: str, dtype: torch.dtype = torch.bfloat16) -> list[Refusal]:
    """Return what each opt-in backend that can run here rejects on a device, norms excepted."""
    rows = []
    for name in verdicts.KERNELS:
        backend, reasons = BACKENDS[name], dict[str, list[str]]()
        if backend.unavailable():
            continue
        for call, problem in _kinds(torch.device(device_type), dtype):
            if isinstance(problem, AttentionProblem):
                for reason in backend.unsupported(problem)[:1]:
                    reasons.setdefault(reason, []).append(call)
        rows += [Refusal(name, device_type, reason, calls) for reason, calls in reasons.items()]
    return rows


def _kinds(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Problem]]:
    def attention(**properties: object) -> AttentionProblem:
        sizes = {"seqlen_q": 1024, "seqlen_k": 1024}
        return AttentionProblem(device, dtype, 64, 64, **{**sizes, **properties})  # type: ignore[arg-type]

    return [
        ("attention", attention()),
        ("attention, causal", attention(mask="causal")),
        ("attention, padded", attention(mask="structured")),
        ("attention, dense mask", attention(mask="dense")),
        ("attention, float mask", attention(mask="bias", bias_dtype=dtype)),
        ("attention, training", attention(needs_grad=True)),
        (
            "attention, learned float mask",
            attention(mask="bias", bias_dtype=dtype, learned_bias=True, needs_grad=True),
        ),
        ("attention, dropout", attention(dropout=True, needs_grad=True)),
        ("attention, softcap", attention(softcap=True)),
        (
            "attention, softcap, 1 GiB of scores",
            attention(softcap=True, large_scores=device.type != "cpu"),
        ),
        ("attention, packed", attention(mask="structured", packed=True)),
        ("attention, with lse", attention(result="lse")),
        ("attention, with weights", attention(result="weights")),
        ("layer_norm", NormProblem(device, dtype, 1024)),
        ("rms_norm", NormProblem(device, dtype, 1024, rms=True)),
        ("norm of a sum, dropout", NormProblem(device, dtype, 1024, residual=True, dropout=True)),
    ]
