"""pytest plugin with which flash-attn 4 compiles its kernels for Hopper without launching them.

The simulated driver cannot load the libraries that CuTe DSL compiles.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the driver would be queried otherwise
from flash_attn.cute import interface


class Compiled(dict):
    """Cache of compiled kernels; each is replaced by a function that does nothing."""

    def __getitem__(self, key: object) -> Any:
        assert key in self
        return lambda *args, **options: None


for function in vars(interface).values():
    if hasattr(function, "compile_cache"):
        function.compile_cache = Compiled()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of compiled kernels of each function of flash-attn."""
    caches = {name: len(getattr(f, "compile_cache", ())) for name, f in vars(interface).items()}
    counts = ", ".join(f"{name} {count}" for name, count in caches.items() if count)
    terminalreporter.line(f"flash-attn 4 compiled: {counts or 'nothing'}")
