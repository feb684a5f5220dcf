"""Mistakes that tests plant in the package."""

from typing import Any

import pytest


def scale_result(patch: pytest.MonkeyPatch, owner: Any, name: str, factor: float = 1.001) -> None:
    """Multiply the result of the function owner.name; 1.001 exceeds the contract's limit."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: right(*args, **kwargs) * factor)
