"""Test backend that runs the CPU kernels and is the default only where it was verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fused_attn.backends import verdicts
from fused_attn.backends.cpp import CppBackend
from fused_attn.backends.registry import BACKENDS

CPU = torch.device("cpu")


class StandIn(CppBackend):
    """Backend whose outputs a test can corrupt by setting `corrupt(call, outputs)`."""

    name = "stand_in"
    accepts_unchecked = False

    def __init__(self):
        self.corrupt = lambda call, outputs: None

    def opt_in_reasons(self, problem):
        return verdicts.reasons_against(self.name, problem)

    def default_for(self, device_type):
        return "some" if verdicts.any_usable(self.name, device_type) else "none"

    def attention_fwd(self, call, for_backward, want_lse):
        outputs = super().attention_fwd(call, for_backward, want_lse)
        self.corrupt(call, outputs)
        return outputs


@contextmanager
def in_place_of_cpp(*first: str) -> Iterator[StandIn]:
    """Register "stand_in" within the block, after the backends `first` and before all others.

    "cpp" is moved to the end of the order, so that no call selects it.
    """
    before, own = dict(BACKENDS), StandIn()
    rest = {name: backend for name, backend in before.items() if name not in ("cpp", *first)}
    ahead = {name: before[name] for name in first}
    _set({**ahead, own.name: own, **rest, "cpp": before["cpp"]})
    verdicts.KERNELS[own.name] = lambda: [Path(__file__)]
    try:
        yield own
    finally:
        _set(before)
        del verdicts.KERNELS[own.name]


def _set(backends):
    BACKENDS.clear()
    BACKENDS.update(backends)
    verdicts.read_again()  # also invalidates the cached default backends
