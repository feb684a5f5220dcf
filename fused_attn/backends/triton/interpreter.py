"""Triton's interpreter, which runs kernels in numpy."""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
