"""Modules of the package and headers of csrc/cpu depend only on the same or lower layers."""

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter

import pytest
from commands import ROOT

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


FILES = {  # by module name
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "fused_attn").rglob("*.py"))
}


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
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append(name if name in FILES or alias.name in LAYERS[0] else node.module)
    exempt = EXCEPTIONS.get(module, "-")
    return {n for n in found if n.split(".")[0] == "fused_attn" and not n.startswith(exempt)}


# Imports from a higher layer, in functions that run only on several ranks.
EXCEPTIONS = {"fused_attn.call.handlers": "fused_attn.distributed"}


@pytest.mark.parametrize("module", FILES)
def test_imports_from_lower_layers_only(module):
    for name in imports(module):
        assert layer(name) <= layer(module), f"{module} imports {name}"


def test_no_import_cycles():
    TopologicalSorter({module: imports(module) for module in FILES}).prepare()


def test_modules_imported_by_a_bare_name_are_unique():
    """Modules that tests import without a package name have different names."""
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
