"""Fixture of the tests of backend "flash"."""

from collections.abc import Callable, Iterator

import pytest
from flash_models import installer


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes only the named engines appear installed."""
    yield from installer(monkeypatch)
