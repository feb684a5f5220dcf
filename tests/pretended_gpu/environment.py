"""Environment variables for the simulated GPU; run as a program, it starts Python with them."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "build" / "pretended-gpu"
PYTHON = FOLDER / "venv" / "bin" / "python"


def missing() -> str | None:
    """Return the missing build step of the simulated GPU, or None."""
    parts = [PYTHON, FOLDER / "lib" / "libcudart.so.13", *[FOLDER / "cmake" / "build.ninja"]]
    absent = [str(part.relative_to(ROOT)) for part in parts if not part.exists()]
    return f"no {absent[0]}: see tests/pretended_gpu/README.md" if absent else None


def environment() -> dict[str, str]:
    """Return the environment variables of a process with the simulated GPU."""
    library, caches = str(FOLDER / "lib"), FOLDER / "cache"
    # `site` has the sitecustomize.py that finds the compiled modules; the package is in ROOT.
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
    import sys

    os.execve(PYTHON, [str(PYTHON), *sys.argv[1:]], environment())
