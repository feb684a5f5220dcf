"""Convert wheels to a kernel repository for the Hugging Face Hub: python hub/export.py dist/*.whl

All wheels must be of one version of the package; each is for one Python version and platform.
`kernels.get_kernel` imports the package under a name that is unique to the version, so its imports
of itself must be relative. The compiled modules include no torch header and work with every torch
version, so the repository has the Hub's layout for kernels of any platform ("noarch"). The layout
for one architecture would require Python's stable ABI, which pybind11 does not support.
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
# Interface version: users pass it to get_kernel, and the name of the Hub branch contains it.
# transformers requests version 1 of a kernel that is passed by name as `attn_implementation`.
VERSION = 1
# Imports to add to the package: kernelize needs `layers`, and transformers calls the functions of
# flash-attn.
EXTRA_NAMES = """
from . import layers as layers
from .compat.flash_attn import flash_attn_func as flash_attn_func
from .compat.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from .compat.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
"""
_IMPORT = re.compile(rf"^(\s*)from {PACKAGE}((?:\.\w+)*) import", re.MULTILINE)


def export(trees: Sequence[Path], out: Path) -> list[Path]:
    """Write the Hub repository to `out`, replacing its contents, and return the variant folders.

    Args:
        trees: unpacked wheels, one per Python version.
        out: root of the Hub repository.
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
    """Copy the package of one wheel into the variant; sources that are already there must match."""
    for source in sorted(package.rglob("*")):
        target = variant / source.relative_to(package)
        if source.suffix == ".so":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        elif source.suffix == ".py":
            text = _relative(source.read_text(), len(target.relative_to(variant).parts) - 1)
            if target.exists() and target.read_text() != text:
                raise SystemExit(f"{source} differs between the wheels: pass wheels of one version")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def _relative(text: str, depth: int) -> str:
    """Rewrite absolute imports of the package in `text` as relative ones.

    Args:
        text: source of a file.
        depth: number of folders between the package root and the file.
    """
    dots = "." * (depth + 1)
    text = _IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2][1:]} import", text)
    if re.search(rf"^\s*import {PACKAGE}", text, re.MULTILINE):
        raise SystemExit(f"`import {PACKAGE}` has no relative form: use `from {PACKAGE} import`")
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
