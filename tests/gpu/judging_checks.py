"""Checks of `fused-attn verify` as tests, for the backends of this machine."""

from __future__ import annotations

import warnings

import pytest
from devices import DEVICE, ON_GPU
from judging import require, skip_if_refused

from fused_attn.tools import verify
from fused_attn.tools.checks import Check
from fused_attn.tools.torch_semantics import adapted, exception
from fused_attn.tools.verify import device_of

OWN = ["triton", "cuda", "flex", "flex_flash", "flash"]


def runnable(names: list[str]) -> list[str]:
    """Return the backends that run on DEVICE; emulated kernels run on the CPU."""
    return [name for name in names if name in ("sdpa", "eager", "cpp") or not verify.against(name)]


def run(backend: str, check: Check) -> None:
    """Run a check on a backend; skip the test if the check does not apply or is not supported."""
    check = adapted(backend, check)
    if reason := exception(backend, check, ON_GPU):
        pytest.skip(f"reason: {reason}")
    device = DEVICE if backend in ("sdpa", "eager", "cpp") else device_of(backend)
    with skip_if_refused(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        findings = check.run(backend, device)
    for warning in caught:
        if "run on eager attention" in str(warning.message):
            pytest.skip(f"reason: refused: {warning.message}")
    try:
        require(findings, backend)
    except AssertionError as error:
        raise AssertionError(f"{check!r}.show({backend!r}, {device.type!r}): {error}") from None
