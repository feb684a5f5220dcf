"""Calls that run out of memory raise exceptions and leak no memory; later calls are correct."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cuda_emulation
import pytest

SUPPORT = Path(cuda_emulation.__file__).parent


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reason: needs LD_PRELOAD and /proc/self/maps")
@pytest.mark.parametrize(("backend", "seeds", "least"), [("cpp", 4, 1000), ("cuda", 3, 100)])
def test_each_request_of_memory_fails(backend, seeds, least, tmp_path):
    if backend == "cuda" and "CUDA_EMULATED" not in os.environ:
        pytest.skip("reason: CUDA_EMULATED is not set")
    library, source = str(tmp_path / "failing_malloc.so"), str(SUPPORT / "failing_malloc.cpp")
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", library], check=True
    )
    command = [sys.executable, str(SUPPORT / "out_of_memory.py"), backend, str(seeds)]
    env = {**os.environ, "LD_PRELOAD": library}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["wrong"] == []
    assert sum(results["told"].values()) >= least
