"""The host code of the GPU backends runs on the simulated GPU of tests/pretended_gpu."""

import sys

import pytest
from commands import ROOT, output_of

FOLDER = ROOT / "tests/pretended_gpu"
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
    command = [environment.PYTHON, "-m", "pytest", *options, FOLDER / "checks.py"]
    output_of(*command, env=environment.environment())
