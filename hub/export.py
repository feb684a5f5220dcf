"""Convert wheels to a kernel for Hugging Face's Hub: python hub/export.py dist/*.whl

All wheels have the same version; each is for one Python and system. `kernels.get_kernel` loads a
folder whose name is unique to the version, so imports in it are relative. The compiled module
includes no torch header, so one file works with every torch version, and the layout is the Hub's
universal one ("noarch"). Variants for one architecture would need Python's stable ABI, which
pybind11 does not support.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm

HERE = Path(__file__).resolve().parent
PACKAGE = "fused_attn"
BACKENDS = ("cpu", "cuda")
# Interface version that get_kernel requests. The branch of the Hub repository has the same number.
# transformers requests version 1 of a kernel whose name is passed as `attn_implementation`.
VERSION = 1
# Names to export besides those of the package. transformers looks for flash-attn's functions.
EXTRA_NAMES = """
from . import layers as layers
from .compat.flash_attn import flash_attn_func as flash_attn_func
from .compat.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from .compat.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
"""
_IMPORT = re.compile(rf"^(\s*)from {PACKAGE}((?:\.\w+)*) import", re.MULTILINE)


def export(trees: Sequence[Path], out: Path) -> list[Path]:
    """Replace the folder `out`; return the folders of its variants.

    Args:
        trees: folders that hold the package, each with the modules compiled for one Python.
        out: the repository's folder.
    """
    shutil.rmtree(out, ignore_errors=True)
    variants = []
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        for tree in trees:
            _add(tree / PACKAGE, variant)
        (variant / "layers.py").write_text(_relative((HERE / "layers.py").read_text(), 0))
        init = variant / "__init__.py"
        init.write_text(init.read_text() + EXTRA_NAMES)
        _describe(variant, backend)
        variants.append(variant)
    shutil.copy(HERE / "README.md", out)
    return variants


def _add(package: Path, variant: Path) -> None:
    """Copy sources and compiled modules; a source that was already copied must be identical."""
    for source in sorted(package.rglob("*")):
        target = variant / source.relative_to(package)
        if source.suffix == ".so":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        elif source.suffix == ".py":
            text = _relative(source.read_text(), len(target.relative_to(variant).parts) - 1)
            if target.exists() and target.read_text() != text:
                raise SystemExit(f"{source}: the wheels are of different versions")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def _relative(text: str, depth: int) -> str:
    """Return the text of a file `depth` folders deep, with relative imports of the package."""
    dots = "." * (depth + 1)
    text = _IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2][1:]} import", text)
    if re.search(rf"^\s*import {PACKAGE}", text, re.MULTILINE):
        raise SystemExit(f"`import {PACKAGE}` has no relative form: import names from it")
    return text


def _describe(variant: Path, backend: str) -> None:
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    unique = hashlib.sha256(json.dumps(digest, sort_keys=True).encode()).hexdigest()[:8]
    metadata = {
        "id": f"_{PACKAGE}_{backend}_{unique}",
        "name": PACKAGE.replace("_", "-"),
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digest},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "hub" / "fused-attn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / wheel.name for wheel in args.wheels]
        for wheel, tree in zip(args.wheels, trees, strict=True):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        for variant in export(trees, args.out):
            print(variant)


if __name__ == "__main__":
    main()
