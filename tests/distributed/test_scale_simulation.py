"""benchmarks/scale_simulation.py computes the expected traffic and times.

The example in docs/distributed.md runs on two ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fused_attn import masks
from fused_attn.distributed import Sharding

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def simulation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale_simulation

    return scale_simulation


def test_records_of_a_causal_mask(simulation):
    setting = simulation.Setting(length=64, node=2)
    pairs = simulation.Pairs(masks.causal(), 64)
    got = simulation.record(Sharding.contiguous(64, 4), pairs, setting)
    assert got["keys_received"] == {"mean": (0 + 16 + 32 + 48) / 4, "max": 48}
    assert got["share_of_full_ring"] == 0.5
    assert got["megabytes_received"]["max"] == pytest.approx(48 * 2 * 8 * 128 * 2 / 1e6)
    work = np.array([sum(range(16 * r + 1, 16 * r + 17)) for r in range(4)])
    assert got["imbalance"] == pytest.approx(work.max() / work.mean())
    per_pair = 4 * 32 * 128 / (setting.tflops * 1e12)
    assert got["forward"]["compute_ms"] == pytest.approx(work.mean() * per_pair * 1e3)


def test_times(simulation):
    """A 3 s transfer that overlaps with 2 s of compute, then 1 s of compute, takes 4 s."""
    sent = np.array([[0, 1], [0, 1]])
    ring = simulation.Ring(np.zeros((2, 2)), sent, sent, 1)
    compute, keys = np.array([[2.0, 1], [2, 1]]), np.array([[0.0, 3], [0, 3]])
    times = simulation.Times(compute, keys, np.zeros((2, 2)))
    assert simulation.finished(ring, times) == 4
    assert simulation.finished_early(times) == 4
    compute[1, 0] = 9  # the last rank is the slowest one
    assert simulation.finished(ring, times) == 10
    times = simulation.Times(compute, keys, 2 * keys)  # gradients are sent after step 1
    assert simulation.finished(ring, times) == 16


def test_requests_two_steps_ahead(simulation):
    """Ranks finish earlier if keys are requested two steps ahead instead of one."""
    ones = np.array([[0, 0, 1]] * 3)
    ring = simulation.Ring(np.zeros((3, 3)), ones, ones, 1)
    times = simulation.Times(np.array([[4.0, 0, 1]] * 3), 5.0 * ones, np.zeros((3, 3)))
    assert simulation.finished(ring, times, ahead=1) == 10
    assert simulation.finished(ring, times, ahead=2) == 6


def test_backward_sends_keys_and_float32_gradients(simulation):
    setting = simulation.Setting(num_heads_kv=1, head_dim=1, node=8, nvlink=1e-9)  # 1 byte/s
    wanted, given = np.array([[0, 5], [0, 7]]), np.array([[0, 7], [0, 5]])
    ring = simulation.Ring(np.zeros((2, 2), np.int64), wanted, given, 1)
    for name, of_gradients in (("forward", 0), ("backward", 56)):
        times = simulation.times_of(ring, setting, name)
        assert times.keys.tolist() == [[0, 28], [0, 28]]
        assert times.gradients.tolist() == [[0, of_gradients], [0, of_gradients]]


@pytest.mark.thorough
def test_example_of_the_page(tmp_path):
    page = (ROOT / "docs/distributed.md").read_text("utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(tmp_path / "example.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
