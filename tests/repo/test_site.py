"""The documentation site builds without warnings and documents every public name."""

import json
import re
import sys

import pytest
from commands import ROOT, output_of

import fused_attn
import fused_attn.distributed
import fused_attn.nn
from fused_attn.compat import flash_attn
from fused_attn.compat.xformers import ops as xops

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
MODULES = {"masks", "nn"}  # names in fused_attn.__all__ with separate pages


def test_reference_has_every_public_name():
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    named = set(re.findall(r"auto(?:function|class):: (fused_attn[\w.]*)", pages))
    public = {f"fused_attn.{name}" for name in set(fused_attn.__all__) - MODULES}
    public |= {f"fused_attn.nn.{name}" for name in fused_attn.nn.__all__}
    public |= {f"fused_attn.distributed.{name}" for name in fused_attn.distributed.__all__}
    names = set(flash_attn.__all__) - {"bert_padding"}
    public |= {f"fused_attn.compat.flash_attn.{name}" for name in names}
    public.add("fused_attn.compat.flex_attention.flex_attention")  # all other names are torch's
    names = {name for name in xops.__all__ if name.startswith("memory")}
    public |= {f"fused_attn.compat.xformers.ops.{name}" for name in names}
    makers = set(fused_attn.masks.__all__) - {"Mask", "as_mask"}
    public |= {f"fused_attn.masks.{name}" for name in makers if name.islower()}
    assert named == public


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs(path):
    """Committed notebooks have no outputs; building the site creates the outputs."""
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.thorough
def test_site_builds_without_a_warning(tmp_path):
    for module in ("sphinx", "furo", "myst_nb", "ipykernel", "sphinx_copybutton"):
        pytest.importorskip(module, reason=f"reason: needs {module}")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    output_of(*command, ROOT / "docs", tmp_path)
    start = (tmp_path / "index.html").read_text()
    notebooks = [f"notebooks/{name}.html" for name in ("swap_bert", "masks")]
    for page in ("masks.html", "reference/functions.html", "examples.html", *notebooks):
        assert f'href="{page}"' in start and (tmp_path / page).exists()
    assert "docs/" not in re.sub(r">[^<]*<", "><", start)
