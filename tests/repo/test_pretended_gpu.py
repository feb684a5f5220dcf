"""The host code of the GPU backends runs on the simulated GPU of tests/pretended_gpu."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "pretended_gpu"
sys.path.insert(0, str(FOLDER))
import environment  # noqa: E402

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(environment.missing() is not None, reason=str(environment.missing())),
]


@pytest.mark.parametrize(
    "checks",
    [
        "test_launches",
        "test_capture",
        "test_waiting",
        "test_refused or test_largest",
        "test_unknown or test_host or test_tensors",
        "test_compiled",
    ],
    ids=["launches", "capture", "waiting", "grids", "errors", "compiled"],
)
def test_checks(checks: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "-k", checks]
    done = subprocess.run(
        [environment.PYTHON, "-m", "pytest", *options, FOLDER / "checks.py"],
        env=environment.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
