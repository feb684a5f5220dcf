"""Files and symbols named in the documentation exist, and generated tables are up to date."""

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import ROOT

from fused_attn import decode_attention, functional, varlen_attention

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "examples/README.md"]
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # may name removed files
FOLDERS = ("csrc", "fused_attn", "tests", "benchmarks", "examples", "docs")
# A link [`symbol`](file) to a symbol and the file that defines it.
SYMBOL = re.compile(r"\[`([^`\]]+)`\]\(([^)#:]+)\)")
# Files and functions in the traces of calls in docs/call-path.md.
TRACED = re.compile(r"^    (\S+\.py) +([\w.]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page):
    """Every linked file exists and defines the symbol that the link names."""
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    symbols = SYMBOL.findall(text)
    assert not [(s, link) for s, link in symbols if not defines(page.parent / link, s)]
    assert not re.search(r"\]\([^)]*#L\d*\)", text), "links must name symbols, not line numbers"


@pytest.mark.parametrize("page", PRESENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files(page):
    """Every file path (from the root) and every file name that a page mentions exists."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text("utf-8"))
    paths = set(re.findall(rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]", text))
    assert not [path for path in paths if not (ROOT / path).exists()]
    sources = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    named = set(re.findall(r"(?<![\w/.])\w+\.(?:py|h|cuh|cpp|cu|inc|cmake)\b", text))
    assert not named - sources - {"setup.py"}


@pytest.mark.parametrize("page", ["transformer.md", "quadratic-cost.md"])
def test_pages_link_to_code(page):
    assert SYMBOL.search((DOCS / page).read_text("utf-8"))


def test_traces_of_calls():
    """Each line of the traces in docs/call-path.md names a function and the file defining it."""
    lines = TRACED.findall((DOCS / "call-path.md").read_text("utf-8"))
    folders = ROOT / "fused_attn", ROOT / "fused_attn/integrations/transformers"
    assert len(lines) > 40
    for name, symbol in lines:
        files = [folder / name for folder in folders if (folder / name).exists()]
        assert any(defines(file, symbol) for file in files), f"{symbol} in {name}"


def entered(run):
    """Return the file and the name of each package function that a call enters, in order."""
    found, package = [], f"{ROOT / 'fused_attn'}/"

    def record(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            found.append((code.co_filename.removeprefix(package), code.co_name))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


X = torch.randn(2, 4, 140, 16)
TOKENS, ENDS = X[0].transpose(0, 1), torch.tensor([0, 40, 140])
NEW = {"key": X, "value": X, "rotary_cos": X[0, 0, :, :8], "rotary_sin": X[0, 1, :, :8]}
CALLS = {  # calls, by the first function of their traces
    "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(
        X.clone().requires_grad_(), X, X, torch.ones(140, 140, dtype=torch.bool)
    ),
    "layer_norm": lambda: functional.layer_norm(X, (16,)),
    "varlen_attention": lambda: varlen_attention(TOKENS, TOKENS, TOKENS, ENDS, ENDS, 100, 100),
    "decode_attention": lambda: decode_attention(
        X, X.clone(), X.clone(), cache_lengths=[0, 0], **NEW
    ),
}
# Functions of the traces that only other calls enter.
NOT_ENTERED = {
    "_checked_step", "with_cache_lengths", "select", "Backend.attention_decode", "_for_torch",
}  # fmt: skip


@pytest.mark.parametrize("title", CALLS)
def test_traces_are_true(title):
    """A call enters the functions of its trace in docs/call-path.md in their order."""
    _, after = (DOCS / "call-path.md").read_text("utf-8").split(f"    {title}(", 1)
    rest = iter(entered(CALLS[title]))
    for file, symbol in TRACED.findall(after.split("\n\n")[1]):
        name = symbol.rpartition(".")[2]
        if symbol not in NOT_ENTERED:
            names = ("__init__", name) if name[0].isupper() else (name,)
            assert any(f == file and n in names for f, n in rest), f"{symbol} in {file}"


def test_undefined_symbols_are_detected(tmp_path):
    python, cpp = tmp_path / "file.py", tmp_path / "file.h"
    python.write_text(
        "LIMIT: int = other(1)\n"
        "class Call:\n    shape: tuple\n    def run(self):\n        self.out = 1\n"
    )
    cpp.write_text("// gone() was here\nstruct Tile {\n  int rows;\n};\n")
    there = ["LIMIT", "Call", "Call.shape", "Call.run", "Call.out"]
    assert all(defines(python, name) for name in there)
    assert defines(cpp, "Tile") and defines(cpp, "Tile::rows")
    assert not any(defines(python, name) for name in ("other", "run", "Call.LIMIT", "Call.run.out"))
    assert not any(defines(cpp, name) for name in ("gone", "Tile::columns", "row"))


def defines(path: Path, symbol: str) -> bool:
    """Return True if a file defines `symbol`: a function, class, constant or field.

    Args:
        symbol: `name` or `Class.member`; in C++ `Class::member`. A C++ file defines it if each
            part occurs as a word outside of comments.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return symbol in _names(ast.parse(text).body)
    code = re.sub(r"//.*", "", text)
    return all(re.search(rf"\b{re.escape(part)}\b", code) for part in symbol.split("::"))


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield the names that a module or class body defines; members are named Class.member."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (prefix + name for name in _assigned(node, ast.Name))
        elif isinstance(node, ast.FunctionDef) and prefix:
            targets = _assigned(node, ast.Attribute)
            yield from (prefix + t.removeprefix("self.") for t in targets if t.startswith("self."))


def _assigned(node: ast.AST, kind: type[ast.expr]) -> list[str]:
    """Return the code of all assignment targets of a kind."""
    found = [n for n in ast.walk(node) if isinstance(n, kind) and isinstance(n.ctx, ast.Store)]
    return [ast.unparse(target) for target in found]


@pytest.mark.parametrize("name", ["block_lists", "decode_steps", "scale_simulation"])
def test_table_is_up_to_date(name, monkeypatch):
    """The script's table in the docs matches the results in its file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    script = importlib.import_module(name)
    page = script.PAGE.read_text("utf-8")
    facts = json.loads(script.RESULTS.read_text("utf-8"))
    assert tables.replaced(page, script.PART, script.table(facts)) == page
