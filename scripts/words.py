"""Check that names, docstrings and pages use plain technical English: `python scripts/words.py`.

Four rules apply: the first sentence of a docstring stands alone, retired words stay retired,
spelling is American, and sentences of the pages are short. EXCEPTIONS lists permitted breaches with
their reasons.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 35
CODE = ("fused_attn", "csrc", "tests", "benchmarks", "examples", "scripts", "hub", "setup.py")
BUILD = ("Makefile", "CMakeLists.txt", "pyproject.toml", ".github")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples/README.md", "hub")
CPP = (".h", ".cuh", ".cpp", ".cu", ".inc")
SOURCES = (".py", *CPP, ".md", "Makefile", ".txt", ".toml", ".yml")

# A docstring that begins with one of these cannot be understood without its context.
OPENINGS = re.compile(
    r"(The same|What|Whether|Of|How|As|That|Those|Where|True if|False if|Who|Which)\b"
)
# Retired words, as patterns of full words in code and prose, and their replacements.
RETIRED = {
    r"panels?_?": "query tile",
    r"short way|long way|whole way": "fast path, full path",
    r"unwatched": "not intercepted",
    r"asked_first|chosen_for_some|first_backend": "is_default, default_backend",
    r"torchs_own": "wraps_torch",
    r"not_automatic": "opt_in_reasons",
    r"out_low|lse_low": "out_residual, lse_residual",
    r"dropout_origin": "dropout_offsets",
    r"chosen by itself": "default",
    r"takes? over": "patches",
    r"nobody sees": "fully masked",
}
# Pattern of a British spelling -> American replacement. In C++ files, only comments are checked.
_VERBS = "initial|material|maxim|minim|normal|optim|organ|quant|random|recogn|serial|special"
BRITISH = {
    rf"({_VERBS}|summa[r]|synchron|token|util|vector)is(?=e|ing|ation|able)": r"\1iz",
    r"(behavi|col|fav|hon|neighb)our": r"\1or",
    r"(cancel|label|model|signal|travel)l(?=ed|ing)": r"\1",
    r"(cent)re(?=s|\b|_)": r"\1er",
    r"(cent)red": r"\1ered",
    r"(licen)ce": r"\1se",
    r"catalogue": "catalog",
    r"(analy)s(?=ed?\b|ing)": r"\1z",
    r"(learn)t\b": r"\1ed",
    r"(fulfil)\b": r"\1l",
}
# (rule, file, text) -> reason why it is permitted. The text "*" stands for the entire file.
EXCEPTIONS = {
    ("retired", "csrc/cpu/kernels/product.h", "panel"): "the BLAS term for a packed operand",
    ("retired", "csrc/cpu/kernels/product.h", "panels"): "the BLAS term for packed operands",
    ("retired", "examples/rnn.py", "panels"): "panels of a plot",
    ("retired", "scripts/words.py", "*"): "the list itself",
    ("retired", "tests/repo/test_words.py", "*"): "planted words",
    ("spelling", "benchmarks/shapes.py", "learnt"): "the text in committed results",
    ("spelling", "csrc/cuda/layer_norm.cuh", "centre"): "the name of an argument",
    ("spelling", "scripts/words.py", "*"): "the list itself",
    ("spelling", "tests/repo/test_words.py", "*"): "planted words",
}


def main() -> None:
    """Print every breach. Exit with status 1 if there is one, otherwise with status 0."""
    found = [*openings(), *retired(), *british(), *long_sentences()]
    print("\n".join(found))
    sys.exit(1 if found else 0)


def openings() -> Iterator[str]:
    """Yield a message for each docstring whose first sentence does not stand alone."""
    for path in tracked(*CODE, suffixes=(".py",)):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            if "property" in map(ast.unparse, getattr(node, "decorator_list", ())):
                continue  # the docstring of a property describes a value, not an action
            text = ast.get_docstring(node) or ""
            if OPENINGS.match(text):
                line = node.body[0].lineno
                yield f"{shown(path)}:{line}: docstring begins {text[:40]!r}"


def retired() -> Iterator[str]:
    """Yield a message for each line with a retired word."""
    words = {re.compile(rf"(?<![\w`]){word}(?![\w`])"): new for word, new in RETIRED.items()}
    for path in tracked(*CODE, *BUILD, *PAGES, suffixes=SOURCES):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            for word, new in words.items():
                match = word.search(line)
                if match and not excepted("retired", path, match[0]):
                    yield f"{shown(path)}:{number}: {match[0]!r}: say {new!r}"


def british() -> Iterator[str]:
    """Yield a message for each word with a British spelling."""
    spellings = {
        re.compile(rf"\w*{old}\w*", re.IGNORECASE): (old, new) for old, new in BRITISH.items()
    }
    for path in tracked(*CODE, *BUILD, *PAGES, suffixes=SOURCES):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            prose = line.partition("//")[2] if path.name.endswith(CPP) else line
            for word, (old, new) in spellings.items():
                match = word.search(prose)
                if match and not excepted("spelling", path, match[0]):
                    american = re.sub(old, new, match[0], flags=re.IGNORECASE)
                    yield f"{shown(path)}:{number}: {match[0]!r}: spell {american!r}"


def long_sentences() -> Iterator[str]:
    """Yield a message for each sentence of the pages that has more than MAX_WORDS words.

    Tables and code are excluded.
    """
    for path in tracked(*PAGES, suffixes=(".md",)):
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"<!--.*?-->", "\n\n", text, flags=re.DOTALL)
        for block in re.split(r"\n\s*\n|\n(?=\s*[-|#>]|\d+\. |    )", text):
            if block.lstrip().startswith(("|", "#", ">")) or block.startswith("    "):
                continue
            prose = re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))
            for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])|(?<=[;:])\s", prose):
                count = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
                if count > MAX_WORDS and not excepted("long", path, sentence[:40]):
                    yield f"{shown(path)}: {count} words: {sentence[:90]}..."


def excepted(rule: str, path: Path, text: str) -> bool:
    """Return True if EXCEPTIONS lists the text, or the entire file."""
    name = shown(path)
    return (rule, name, text) in EXCEPTIONS or (rule, name, "*") in EXCEPTIONS


def tracked(*places: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the tracked files under the given places that have one of the suffixes."""
    listed = subprocess.run(
        ["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(suffixes)]
    return [path for path in paths if path.exists()]


def shown(path: Path) -> str:
    """Return a path as it appears in messages."""
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    main()
