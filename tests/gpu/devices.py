"""Device of the tests in this folder: the GPU if there is one, else the CPU.

A run on a CPU only checks that the tests work.
"""

from __future__ import annotations

import torch

from fused_attn.tools.cases import DTYPES as NAMES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPES = [getattr(torch, name) for name in NAMES]
# Backends that run calls before `fused-attn verify`; "default" stands for backend=None.
DEFAULT = "default"
BACKENDS = ["sdpa", "eager", DEFAULT]
COMPILER = "inductor" if ON_GPU else "aot_eager"  # Inductor's C++ takes minutes on a CPU


def named(backend: str) -> str | None:
    """Return the value to pass to the package's functions as `backend`; None for the default."""
    return None if backend == DEFAULT else backend


def by_torch(backend: str) -> bool:
    """Return True if a backend runs torch's kernels for the calls that they support."""
    return backend == "sdpa" or (backend == DEFAULT and ON_GPU)
