"""The site of the docs: it builds without a warning, and has every public name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fused_attn
import fused_attn.nn

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"masks", "nn"}  # of fused_attn.__all__: they have pages of their own


def test_reference_has_every_public_name():
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    named = set(re.findall(r"auto(?:function|class):: (fused_attn[\w.]*)", pages))
    public = {f"fused_attn.{name}" for name in set(fused_attn.__all__) - MODULES}
    public |= {f"fused_attn.nn.{name}" for name in fused_attn.nn.__all__}
    makers = set(fused_attn.masks.__all__) - {"Mask", "as_mask"}
    public |= {f"fused_attn.masks.{name}" for name in makers if name.islower()}
    assert named == public


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    for module in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(module, reason=f"reason: needs {module}")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "index.html").read_text()
    for page in ("masks.html", "reference/functions.html", "examples.html"):
        assert f'href="{page}"' in start and (tmp_path / page).exists()
    assert "docs/" not in re.sub(r">[^<]*<", "><", start)
