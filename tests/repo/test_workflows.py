"""GitHub's workflows are valid and run commands that exist."""

import re
import sys

import pytest
from commands import ROOT, output_of

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_workflows_are_valid():
    pytest.importorskip("check_jsonschema", reason="reason: needs check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    assert WORKFLOWS
    output_of(*command, "vendor.github-workflows", *WORKFLOWS)


def test_workflows_call_existing_targets_and_files():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in [path.read_text() for path in WORKFLOWS]:
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets)
        for path in re.findall(r"uses: \./(\S+)", text) + re.findall(r"run: (\.\S+)", text):
            assert (ROOT / path).exists()
        # Jobs have only read permission by default, and each action is pinned to a version.
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE)
        assert all("@" in action for action in re.findall(r"uses: ([^.\s]\S*)", text))


def test_tests_named_in_the_makefile_exist():
    """Each test name in the Makefile is, or begins, the name of a test function."""
    names = set(re.findall(r"\btest_\w+(?=[ )\"])", (ROOT / "Makefile").read_text()))
    code = "\n".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    assert names and not [name for name in names if not re.search(rf"^def {name}", code, re.M)]


def test_modules_of_workflows_have_an_entry_point():
    """Every module that a workflow runs with `python -m` has a `__main__` entry point."""
    for text in [path.read_text() for path in WORKFLOWS]:
        for name in re.findall(r"python3? -m (fused_attn[.\w]*)", text):
            path = ROOT / name.replace(".", "/")
            main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            assert "__main__" in main.name or '__name__ == "__main__"' in main.read_text(), name
