"""The pages in docs/ and examples/: what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import doc_links
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "examples/README.md"]


@pytest.mark.parametrize("page", sorted(doc_links.DOCS.glob("*.md")), ids=lambda p: p.name)
def test_lines(page):
    """`python tests/support/doc_links.py` mends the numbers."""
    text = page.read_text("utf-8")
    assert doc_links.with_lines(text) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["architecture.md", "quadratic-cost.md"])
def test_pages_point_at_code(page):
    assert doc_links.LINK.search((doc_links.DOCS / page).read_text("utf-8"))
