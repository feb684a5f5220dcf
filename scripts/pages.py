"""Generated parts of pages, which stand between two comments."""


def parts(page: str, what: str) -> tuple[str, str, str]:
    """Return the page before the generated part `what`, that part, and the page after it."""
    before, rest = page.split(f"<!-- {what}: begin -->\n")
    part, after = rest.split(f"<!-- {what}: end -->")
    return f"{before}<!-- {what}: begin -->\n", part, f"<!-- {what}: end -->{after}"


def replaced(page: str, what: str, text: str) -> str:
    before, _, after = parts(page, what)
    return f"{before}{text}\n{after}"
