"""scripts/soak.py: a short run without failures, and runs with planted mistakes."""

import sys

import commands
import pytest
import soak
import soak_calls
import torch
from helpers import use_threads

import fused_attn

HANGS = """
import time, soak, soak_calls
soak.STUCK, soak.PROCESSES = 2, {}
soak.KINDS = soak_calls.KINDS = {"norm": lambda r: time.sleep(99)}
soak.main(["--minutes", "1"])
"""


@pytest.mark.slow
def test_short_run(monkeypatch):
    monkeypatch.setattr(soak, "GROWTH", float("inf"))  # the run is too short to measure growth
    run = soak.Soak(3, 0)
    with use_threads(2), fused_attn.enabled():  # as in child processes
        run.run(0.1)
        for process in soak.PROCESSES.values():
            process(run, soak.Draw(0))
    assert not run.failures
    # 3 repeats in this process, and 6 * 3 in child processes
    assert sum(count["repeated"] for count in run.counts.values()) >= 21


MISTAKES = {
    "memory grew": lambda r, kept=[]: kept.append(torch.ones(1 << 18)) or kept[-1:],
    "other bits": lambda r: [torch.rand(3)],
    "KeyError": lambda r: {}[0],
}


@pytest.mark.thorough
@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_reported(message, monkeypatch):
    monkeypatch.setattr(soak, "PROCESSES", {})
    monkeypatch.setattr(soak, "GROWTH", 2.0)
    for module in (soak, soak_calls):
        monkeypatch.setattr(module, "KINDS", {"norm": MISTAKES[message]})
    run = soak.Soak(2, 0)
    run.run(0.05)
    assert any(message in failure for failure in run.failures)


@pytest.mark.thorough
def test_deadlocks_are_reported():
    done = commands.run(sys.executable, "-c", HANGS, cwd=commands.ROOT / "scripts")
    assert done.returncode == 1 and 'soak_calls.py", line' in done.stderr
