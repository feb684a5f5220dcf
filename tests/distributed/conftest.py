"""Fixture for the ranks that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import Processes


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Yield four processes, one per rank, which run until the end of the session."""
    processes = Processes(4, tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()
