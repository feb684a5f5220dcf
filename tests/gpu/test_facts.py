"""Records of the machine for scripts/gpu_session.py; these tests run first."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE, ON_GPU

from fused_attn.backends import verdicts
from fused_attn.tools import doctor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_machine(record_property):
    """The device adds two numbers correctly; the GPU, driver and package versions are recorded."""
    assert torch.ones(2, device=DEVICE).sum().item() == 2.0
    facts = {"driver": verdicts._driver(), **doctor.machine(), **doctor.versions()}
    if ON_GPU:
        facts["cuda"] = torch.version.cuda or torch.version.hip
    record_property("machine", {name: value for name, value in facts.items() if value})


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_modules(name):
    """Each compiled module can be imported; if not, the error is the reason of the skip."""
    try:
        importlib.import_module(f"fused_attn.{name}")
    except ImportError as error:
        pytest.skip(f"reason: {error}")


def test_ceilings(record_property, monkeypatch):
    """Record the rates of a copy and of a bfloat16 matmul, the ceilings of the benchmarks."""
    if not ON_GPU:
        pytest.skip("reason: needs a GPU")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("measure", None)
    meter = importlib.import_module("measure").GpuMeter(DEVICE)
    rates = {name: round(rate / 1e9, 1) for name, rate in meter.ceilings().items()}
    assert all(rate > 0.0 for rate in rates.values())
    record_property("ceilings", rates)
