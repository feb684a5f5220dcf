"""Detection of Triton's interpreter, which runs kernels in NumPy."""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
