"""Links from the docs to lines of code: `python tests/support/doc_links.py` brings them up to date.

A link is [`fragment`](../file.py#L12): the fragment stands in one line of the file, the 12th. With
[`scope … fragment`](...) it is the first such line behind the one that begins a class or function.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINK = re.compile(r"\[`([^`\]]+)`\]\(([^)#]+)#L(\d*)\)")


def with_lines(page: str) -> str:
    """The page with the lines that its links are to point at.

    Raises:
        ValueError: a fragment is not in its file, or in several lines.
    """

    def link(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        return f"[`{text}`]({path}#L{_line(text, path)})"

    return LINK.sub(link, page)


def _line(text: str, path: str) -> int:
    lines = (DOCS / path).read_text("utf-8").splitlines()
    scope, separator, fragment = text.partition(" … ")
    begin = 0
    if separator:
        heads = [i for i, line in enumerate(lines) if re.search(rf"(class|def) {scope}\b", line)]
        if len(heads) != 1:
            raise ValueError(f"{path} must have one class or def {scope}, got {len(heads)}")
        begin = heads[0]
    else:
        fragment = text
    found = [i for i in range(begin, len(lines)) if fragment in lines[i]]
    if not found or (not separator and len(found) > 1):
        raise ValueError(f"{path} must have one line with {fragment!r}, got {len(found)}")
    return found[0] + 1


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(with_lines(path.read_text("utf-8")), "utf-8")
