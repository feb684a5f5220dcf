"""A crash or a broken GPU context costs `fused-attn verify` only one step."""

import json
import math
import os
import time
from functools import partial

import pytest
import torch
from small_plans import class_named, fast, small_plan
from stand_in import CPU, in_place_of_cpp

from fused_attn.tools import isolation, verify
from fused_attn.tools.isolation import WorkerError

__all__ = ["fast"]  # a fixture
pytestmark = pytest.mark.usefixtures("fast")


class Processes:
    """Fake GPU worker that runs steps in this process and simulates crashes and lost contexts."""

    def __init__(self, fails):
        self.fails, self.started, self.running = fails, 0, False

    def run(self, step, check, backend, device, *args):
        self.started += not self.running
        self.running = True
        trial = step(check, backend, CPU, *args)
        if self.fails(check) == "crash":
            self.running = False
            raise WorkerError("the process died (SIGSEGV)")
        if self.fails(check) == "sticky":
            trial.error, trial.lost = "illegal memory access", True
        return trial

    def stop(self):
        self.running = False


def on_pretended_gpu(monkeypatch, fails):
    """Verify the stand-in backend as if on a GPU; return the report and the fake worker."""
    processes = Processes(fails)
    monkeypatch.setattr(verify, "Worker", lambda limit: processes)
    monkeypatch.setattr(verify, "device_of", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(verify, "against", lambda name: [])
    with in_place_of_cpp() as backend:
        return verify.verify(backend.name, small_plan()), processes


@pytest.mark.parametrize("how", ["crash", "sticky"])
def test_a_crash_costs_one_step(how, verdict_folder, monkeypatch):
    """After a crash, the other checks run in a new process, and their verdicts are stored."""

    def fails(check):
        return how if getattr(check, "mask", "") == "causal" and check.gradients else ""

    report, processes = on_pretended_gpu(monkeypatch, fails)
    assert 2 <= len(report.wrong) == sum(trial.lost for trial in report.trials)
    assert processes.started == len(report.wrong) + 1
    assert report.classes[class_named("none", "training")].usable
    assert report.classes[class_named("causal", "training")].found == "wrong"
    assert json.loads(report.path.read_text())["classes"] == report.to_dict()["classes"]


def test_after_repeated_failures_the_gpu_is_not_used(verdict_folder, monkeypatch):
    report, processes = on_pretended_gpu(monkeypatch, lambda check: "sticky")
    assert processes.started == verify.MAX_LOST and report.usable == []
    assert "not run, because the GPU failed" in report.trials[-1].failure()


@pytest.mark.parametrize("function", [os.abort, partial(os._exit, 3), partial(time.sleep, 60)])
def test_workers(function):
    """If a worker process dies or exceeds its time limit, the next step runs in a new process."""
    worker = isolation.Worker(5.0)
    assert worker.run(math.sqrt, 4.0) == 2.0
    with pytest.raises(isolation.WorkerError, match=r"SIGABRT|exit status 3|no result after 5 s"):
        worker.run(function)
    assert worker.run(math.sqrt, 9.0) == 3.0
    worker.stop()
