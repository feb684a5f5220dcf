"""Code, commands and tables in the README and docs/ are correct, and the README is short."""

import re

import pytest
from commands import ROOT

from fused_attn import masks
from fused_attn.backends.registry import BACKENDS
from fused_attn.tools import cli

README = ROOT / "README.md"
# Pages whose content docs/conf.py generates are excluded.
DOCS = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if not page.read_text("utf-8").startswith(("%", "```{toctree}"))
]
PAGES = [README, *DOCS, ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md"]
MAX_LINES = 150
# Python code blocks by page name and index on the page.
BLOCKS = {
    f"{page.name}-{i}": block
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    )
}


def test_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= MAX_LINES


def test_readme_names_every_page():
    text = README.read_text("utf-8")
    assert not [page.name for page in DOCS if f"](docs/{page.name})" not in text]


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_run(name):
    """Each code block runs without the blocks before it."""
    exec(compile(BLOCKS[name], name, "exec"), {"__name__": name})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page):
    """Make targets in code blocks exist, and arguments of fused-attn commands are valid."""
    text = page.read_text("utf-8")
    code = "\n".join(
        [*re.findall(r"^    (.*)$", text, re.MULTILINE), *re.findall(r"`(.*?)`", text)]
    )
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = re.findall(r"^make ([a-z -]+?)(?= *(?:#|[A-Z]|$))", code, re.MULTILINE)
    assert not {target for line in made for target in line.split()} - targets
    for line in re.findall(r"^fused-attn (.+?)(?: *#.*)?$", code, re.MULTILINE):
        if line != "...":
            cli.parser().parse_args(line.split())


def test_every_mask_is_listed():
    page = (ROOT / "docs/masks.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE))
    functions = {
        name
        for name, value in vars(masks).items()
        if getattr(value, "__annotations__", {}).get("return") == "Mask" and name[0] != "_"
    }
    assert listed == functions


def test_every_backend_has_a_status():
    """The README's table lists every backend; its only other rows are marked as planned."""
    _, table = README.read_text("utf-8").split("| backend |")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table, re.MULTILINE)
    assert {name for name, status in rows if status != "planned"} == BACKENDS.keys()


def test_values_of_environment_variables_are_listed():
    page = (ROOT / "docs/install.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(FUSED_ATTN_\w+)` \|.*\| (.*) \|$", page, re.MULTILINE))
    assert re.findall(r"`(\w+)`", rows["FUSED_ATTN_BACKEND"]) == list(BACKENDS)
    isas = re.findall(r"^FUSED_ATTN_ISA\((\w+),", (ROOT / "csrc/cpu/isas.inc").read_text(), re.M)
    assert re.findall(r"`(\w+)`", rows["FUSED_ATTN_CPU_ISA"]) == isas


def test_pages_show_the_latest_results(monkeypatch):
    """Generated parts of pages are equal to the output of `python benchmarks/report.py`."""
    pytest.importorskip("matplotlib", reason="reason: matplotlib is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import report
    import tables

    for page, parts in report.generated().items():
        text = page.read_text("utf-8")
        for name, inner in parts.items():
            assert tables.replaced(text, name, inner) == text
