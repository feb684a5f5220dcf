"""Each row of differences in docs/compatibility.md names tests of PyTorch and has a reason."""

from __future__ import annotations

import torch_suite


def test_page_gives_reasons():
    rows = torch_suite._listed(torch_suite.PAGE.read_text("utf-8"))
    assert rows
    assert all(set(row.swaps.split(", ")) <= set(torch_suite.SWAPS) for row in rows)
    assert all("`" in row.patterns and len(row.reason) > 20 for row in rows)
