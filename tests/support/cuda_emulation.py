"""Loader of CUDA kernels compiled for the CPU (tests/cuda_emulator), to test the backend "cuda".

`make emulator` builds the kernels. The tests use them if CUDA_EMULATED=1 is set. Any other value
except 0 is the folder of another build, for example that of `make sanitize`.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path

from fused_attn.backends import cuda

MODULE = "_cuda_emulated"
BUILD_DIR = Path(__file__).resolve().parents[2] / "build" / "cuda_emulator"


def use() -> None:
    """Make the backend "cuda" run the emulated kernels on CPU tensors."""
    chosen = os.environ["CUDA_EMULATED"]
    folder = BUILD_DIR if chosen == "1" else Path(chosen)
    path = folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        raise FileNotFoundError(f"CUDA_EMULATED={chosen} needs {path}: make emulator")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cuda.use_module(module)
