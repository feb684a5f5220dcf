"""The comparison of PyTorch's own tests, on tests that stand in for them."""

from __future__ import annotations

import re

import pytest
import torch_suite
from torch_in_place import read_outcomes

TESTS = """
import os
import unittest

import torch
import torch.nn.functional as F

class TestStandIn(unittest.TestCase):
    def test_same(self):
        query = torch.randn(1, 2, 3, 8)
        F.scaled_dot_product_attention(query, query, query)
        torch.nn.LayerNorm(8)(query)

    def test_function(self):
        self.assertTrue(F.rms_norm.__module__.startswith("torch."))

    def test_class(self):
        self.assertTrue(torch.nn.RMSNorm.__module__.startswith("torch."))

    def test_crash(self):
        if not F.layer_norm.__module__.startswith("torch."):
            os.abort()

    def test_left_out(self):
        pass

    @unittest.skip("no GPU")
    def test_skipped(self):
        pass
"""

PAGE = """
Counts:

<!-- counts: begin -->
<!-- counts: end -->

<!-- differences: begin -->
| in torch's place | tests | number | reason |
|---|---|---|---|
| functions, modules | `TestStandIn::test_func*`, `*::test_class` | 0 | looks at names |
| modules | `TestStandIn::test_same` | 7 | none |
<!-- differences: end -->
"""


@pytest.mark.thorough
def test_differences_are_found_and_held_to_the_page(tmp_path, monkeypatch, capsys):
    """expecttest is what PyTorch's tests import, not these."""
    tests, page = tmp_path / "pytorch" / "test_stand_in.py", tmp_path / "page.md"
    tests.parent.mkdir()
    tests.write_text(TESTS)
    page.write_text(PAGE)
    monkeypatch.setattr(torch_suite, "FILES", {tests.name: "same|function|class|crash|skipped"})
    monkeypatch.setattr(torch_suite, "find_spec", lambda name: name)
    arguments = ["--pytorch", tests.parent, "--page", page, "--results", tmp_path / "results"]

    def run(*more):
        monkeypatch.setattr("sys.argv", ["torch_suite.py", *map(str, arguments), *more])
        status = torch_suite.main()
        return status, capsys.readouterr().out.splitlines()

    status, lines = run()
    assert status == 1
    assert "functions: TestStandIn::test_crash: passed -> crashed: " in lines
    stale = "| modules | `TestStandIn::test_same` | 0 | none |: nothing of that differs"
    assert stale in lines
    assert lines[-1] == "1 differences that are not listed, 1 rows that are not found"
    assert "| pass on both | 2 | 3 |" in lines
    assert "| of these, on kernels of ours | 1 | 1 |" in lines
    assert "| differ | 2 | 1 |" in lines

    def written_down(pytorch, swap, folder, most):
        return read_outcomes(folder / f"{swap}-{tests.stem}.jsonl")

    monkeypatch.setattr(torch_suite, "_run", written_down)
    elsewhere = "| modules | `TestStandIn::test_same` | 7 | On some CPUs: none |"
    page.write_text(
        PAGE.replace(
            "modules | `TestStandIn::test_same` | 7 | none |",
            "functions | `*crash` | 1 | none |\n" + elsewhere,
        )
    )
    status, lines = run("--write")
    assert status == 0
    assert lines[-1] == "0 differences that are not listed, 0 rows that are not found"
    written = page.read_text()
    assert re.search("begin -->\ntorch .*, 5 tests:\n", written)
    assert "| skipped on both | 1 | 1 |" in written
    assert "| functions, modules | `TestStandIn::test_func*`, `*::test_class` | 2 |" in written
    assert "| functions | `*crash` | 1 | none |" in written
    assert elsewhere.replace("7", "0") in written


def test_page_says_why():
    rows = torch_suite._listed(torch_suite.PAGE.read_text("utf-8"))
    assert rows
    assert all(set(row.swaps.split(", ")) <= set(torch_suite.SWAPS) for row in rows)
    assert all("`" in row.patterns and len(row.reason) > 20 for row in rows)
