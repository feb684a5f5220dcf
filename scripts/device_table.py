"""Generator of a table in docs/support.md: backends of calls on devices without verified kernels.

The devices are simulated. Dispatch sees the device, but tensors are on the CPU, and torch's CPU
kernels replace those of the device. `python scripts/device_table.py` writes the table to the page.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pages
import torch
import torch.nn.functional as F

import fused_attn as fa
from fused_attn.backends import problem_of, registry
from fused_attn.nn import weights
from fused_attn.ops import dispatch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
DEVICES = ("cuda", "mps", "xpu")


@contextlib.contextmanager
def pretended(device_type: str) -> Iterator[list[str]]:
    """Make dispatch treat all tensors as if on a device for which this package has no kernels.

    Yields a list, to which each validated call appends the name of its backend.
    """
    chosen: list[str] = []
    device = torch.device(device_type)

    def problem(*args: Any) -> Any:
        return replace(problem_of(*args), device=device)

    def to_try(call: Any, _: Any, named: Any) -> Any:
        return registry.backend_for_unchecked(call, device, named)

    def select(*args: Any) -> Any:
        backend = registry.select(*args)
        chosen.append(backend.name)
        return backend

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dispatch, "problem_of", problem))
        stack.enter_context(mock.patch.object(dispatch, "select", select))
        stack.enter_context(mock.patch.object(dispatch, "backend_for_unchecked", to_try))
        stack.enter_context(mock.patch.object(registry, "_notified", set()))
        registry._first_on.cache_clear()
        yield chosen
    registry._first_on.cache_clear()


def calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return, for each kind of call, this package's function and its equivalent in torch."""
    q, k, v = torch.randn(3, 2, 4, 32, 64).unbind()
    x, w = torch.randn(8, 64), torch.randn(64)
    lengths = torch.tensor([32, 20])
    padding, bias = fa.masks.padding(lengths), torch.randn(1, 4, 32, 32)
    visible = (torch.arange(32) < lengths[:, None])[:, None, None]
    ours, torchs = fa.scaled_dot_product_attention, F.scaled_dot_product_attention
    return {
        "attention": (lambda: ours(q, k, v), lambda: torchs(q, k, v)),
        "causal mask": (
            lambda: ours(q, k, v, is_causal=True),
            lambda: torchs(q, k, v, is_causal=True),
        ),
        "padding mask": (lambda: ours(q, k, v, padding), lambda: torchs(q, k, v, visible)),
        "float mask": (lambda: ours(q, k, v, bias), lambda: torchs(q, k, v, bias)),
        "dropout": (lambda: ours(q, k, v, None, 0.1), lambda: torchs(q, k, v, None, 0.1)),
        "layer_norm": (lambda: fa.layer_norm(x, 64, w, w), lambda: F.layer_norm(x, (64,), w, w)),
        "rms_norm": (lambda: fa.rms_norm(x, 64, w), lambda: F.rms_norm(x, (64,), w)),
        "norm with residual": (
            lambda: fa.layer_norm(x, 64, w, w, residual=x),
            lambda: F.layer_norm(x + x, (64,), w, w),
        ),
        "softcap": (lambda: ours(q, k, v, softcap=30.0), lambda: None),
        "need_weights": (
            lambda: weights.attention_with_weights(q, k, v),
            lambda: ((q * 0.1) @ k.mT).softmax(-1) @ v,
        ),
    }


def operations(call: Callable[[], Any]) -> int:
    """Return the number of top-level torch operations of a call, after a run that fills caches."""
    call()
    with torch.no_grad(), torch.profiler.profile(activities=[_CPU]) as profile:
        call()
    return sum(e.name.startswith("aten::") and e.cpu_parent is None for e in profile.events())


_CPU = torch.profiler.ProfilerActivity.CPU


def row(device_type: str, kind: str) -> tuple[str, int, int, str]:
    """Return a call's backend on a device, its operations, torch's operations, and its warnings."""
    own, torchs = calls()[kind]
    with pretended(device_type) as chosen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own()
        backend = chosen[0] if chosen else registry.default_backend(torch.device(device_type)).name
        count = operations(own)
    return backend, count, operations(torchs), "; ".join(str(w.message) for w in caught)


def table() -> str:
    """Return the table as Markdown."""
    rows = [
        "| call | backend on CUDA, MPS and XPU | torch ops | torch ops of the same call in torch |",
        "|---|---|---|---|",
    ]
    for kind in calls():
        each = {row(device_type, kind)[:3] for device_type in DEVICES}
        (backend, count, torchs), *others = each
        assert not others, f"devices differ: {each}"
        rows.append(f"| {kind} | `{backend}` | {count} | {torchs or ''} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Return the page with the table replaced by a new one."""
    return pages.replaced(page, "devices", table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
