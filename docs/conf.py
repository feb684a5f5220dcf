"""Sphinx: the docs as a site. `make docs` builds it into build/site."""

import posixpath
import re
from pathlib import Path

import fused_attn

project = "fused_attn"
author = "The fused_attn authors"
release = version = fused_attn.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_show_copyright = False
html_title = f"fused_attn {release}"

# Notebooks are kept without outputs, and run as the site is built.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the repository's files begin anywhere

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"

# ---- pages are written to be read in the repository too -----------------------------------------

ROOT = Path(__file__).resolve().parents[1]
# Of these pages the text is elsewhere.
PAGES = {
    "index": "README.md",
    "examples": "examples/README.md",
    "contributing": "CONTRIBUTING.md",
    "changes": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```|^ {4}[^\n]*$)", re.MULTILINE | re.DOTALL)


def with_links_of_the_site(text: str, source: str, page: str) -> str:
    """Links are those of `source`, a file of the repository, made to hold in a page of the site.
    Those to code, and to Markdown that is no page of it, become downloads."""
    pages = {file: name for name, file in PAGES.items()}

    def linked(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = f"docs/{pages[path]}.md" if path in pages else path
        there = posixpath.relpath(place, posixpath.dirname(f"docs/{page}"))
        outside = "path:" if place.endswith(".md") and not place.startswith("docs/") else ""
        return f"{label}({outside}{there}{anchor or ''})"

    parts = _CODE.split(text)
    return "".join(p if i % 2 else _LINK.sub(linked, p) for i, p in enumerate(parts))


def on_source_read(app, docname, content):
    """Fills in pages whose text is elsewhere, and their links and all others."""
    if docname.startswith("notebooks/"):
        return
    source = PAGES.get(docname, f"docs/{docname}.md")
    text = (ROOT / source).read_text() if docname in PAGES else content[0]
    own = content[0] if docname in PAGES else ""
    content[0] = with_links_of_the_site(text, source, docname) + "\n" + own


# ---- docstrings are plain text ------------------------------------------------------------------


def on_docstring(app, what, name, obj, options, lines):
    """Stars and bars are what they are, except in code; sources are paragraphs."""

    def plain(line: str) -> str:
        parts = re.split(r"(`+[^`]*`+)", line)
        return "".join(p if i % 2 else re.sub(r"([*|])", r"\\\1", p) for i, p in enumerate(parts))

    of_source = False
    for i, line in enumerate(lines):
        of_source = line.startswith("Source:") or (of_source and bool(line))
        line = line.lstrip() if of_source else line
        lines[i] = line if line.lstrip().startswith((">>>", "...")) else plain(line)


def setup(app):
    app.connect("source-read", on_source_read)
    app.connect("autodoc-process-docstring", on_docstring, priority=400)  # before napoleon
