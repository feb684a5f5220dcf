"""Environment variables of the simulated GPU. As a script, this file starts Python with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "build" / "pretended-gpu"
PYTHON = FOLDER / "venv" / "bin" / "python"


def missing() -> str | None:
    """Return a message about a missing part of the simulated GPU, or None."""
    for part in (PYTHON, FOLDER / "lib" / "libcudart.so.13", FOLDER / "cmake" / "build.ninja"):
        if not part.exists():
            return f"no {part.relative_to(ROOT)}: see tests/pretended_gpu/README.md"
    return None


def environment() -> dict[str, str]:
    """Return the environment variables of a process with the simulated GPU."""
    library, caches = str(FOLDER / "lib"), FOLDER / "cache"
    # sitecustomize.py in `site` finds the compiled modules; the package is in ROOT.
    paths = [HERE, HERE / "site", ROOT, HERE.parent / "support", ROOT / "scripts"]
    return os.environ | {
        "LD_LIBRARY_PATH": library,
        "TRITON_LIBCUDA_PATH": library,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "XDG_CACHE_HOME": str(caches),  # keep verdicts on the simulated GPU out of ~
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    os.execve(PYTHON, [str(PYTHON), *sys.argv[1:]], environment())
