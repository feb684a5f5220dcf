"""The code in the README runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_blocks_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)


def test_every_mask_is_listed():
    from fused_attn import masks

    listed = set(re.findall(r"^\| `(\w+)\(", README.read_text(), re.MULTILINE))
    made = {
        name
        for name, value in vars(masks).items()
        if getattr(value, "__annotations__", {}).get("return") == "Mask" and name[0] != "_"
    }
    assert listed == made


def test_table_of_surfaces_is_up_to_date():
    """`python tests/support/surfaces.py` writes it; it fails where a test that it names is gone."""
    pytest.importorskip("transformers", reason="reason: transformers is not installed")
    import surfaces

    readme = README.read_text()
    assert surfaces.with_table(readme) == readme
