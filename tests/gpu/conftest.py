"""Mark the tests of this folder `gpu` if there is a GPU; otherwise mark long ones `thorough`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from devices import ON_GPU

HERE = Path(__file__).parent
# Without a GPU, `make test` runs only these files, which take a few seconds.
SHORT = ("test_smoke.py", "test_cudnn_kept_out.py")

# cuBLAS is deterministic only with a fixed workspace. torch reads the variable once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(tryfirst=True)  # so that -m applies to the markers that are added here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        if ON_GPU:
            item.add_marker("gpu")
        elif item.path.name not in SHORT or "compiled" in item.name:
            item.add_marker("thorough")
