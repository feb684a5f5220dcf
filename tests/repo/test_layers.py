"""Modules of the package and headers of csrc/cpu depend only on the same or lower layers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [
    {"_cpu", "_cuda", "version"},
    {"base"},
    {"masks"},
    {"call"},
    {"backends"},
    {"ops"},
    {"functional", "decode"},
    {"nn"},
    {"compat", "integrations", "swap"},
    {"distributed"},
    {"tools"},
]


def name_of(path: Path) -> str:
    """Return the module name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((ROOT / "fused_attn").rglob("*.py"))}


def layer(module: str) -> int:
    """Return the index of a module's layer; the package itself is above all layers."""
    first = module.split(".")[1:2] or [""]
    return next((n for n, names in enumerate(LAYERS) if first[0] in names), len(LAYERS))


def imports(module: str) -> set[str]:
    """Return the package's modules that a module imports, at the top level or in functions."""
    found = []
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [
                n if n in FILES or n.rpartition(".")[2] in LAYERS[0] else node.module for n in names
            ]
    above = ABOVE.get(module, "-")
    return {n for n in found if n.split(".")[0] == "fused_attn" and not n.startswith(above)}


# Imported in functions, when a call on several ranks needs it.
ABOVE = {"fused_attn.call.handlers": "fused_attn.distributed"}


@pytest.mark.parametrize("module", FILES)
def test_imports_from_lower_layers_only(module):
    for name in imports(module):
        assert layer(name) <= layer(module), f"{module} imports {name}"


def test_no_import_cycles():
    TopologicalSorter({module: imports(module) for module in FILES}).prepare()


def test_modules_imported_by_a_bare_name_are_unique():
    """One test process imports all of them: of two with one name, it would get the first."""
    folders = ("benchmarks", "examples", "scripts", "tests/pretended_gpu", "tests/support")
    names = Counter(p.stem for f in folders for p in (ROOT / f).glob("*.py"))
    assert not [name for name, count in names.items() if count > 1]


SOURCES = [path.relative_to(ROOT) for path in sorted((ROOT / "csrc/cpu").rglob("*.h"))]
FOLDERS = ["simd", "amx", "kernels"]  # vectors, tile registers, kernels


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_cpu_headers_include_from_lower_folders_only(path):
    own = FOLDERS.index(path.parent.name) if path.parent.name in FOLDERS else len(FOLDERS)
    for folder in re.findall(r'#include "cpu/(\w+)/', (ROOT / path).read_text()):
        assert FOLDERS.index(folder) <= own
