"""scripts/stages.py runs small generated test files and summarizes their results."""

import sys
from pathlib import Path

import commands
import pytest
import stages
from stages import Stage

MIXED = """
import pytest

class TestGroup:
    @pytest.mark.parametrize("x", [1, 2.5])
    def test_some(self, x):
        assert x == 1

def test_left_out():
    pytest.skip("reason: not here")

@pytest.fixture
def broken():
    raise ValueError

def test_error(broken):
    pass
"""
PASSES = "import os\n\ndef test_environment():\n    assert os.environ['STAGE'] == '1'\n"


def stage(folder: Path, name: str, text: str, *arguments: str) -> Stage:
    path = folder / f"test_{name}.py"
    path.write_text(text)
    # loading plugins takes seconds
    environment = {"STAGE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # By default, rootdir is a common ancestor of this folder and the working directory.
    options = ["--rootdir", str(folder), "-p", "no:cacheprovider"]
    return Stage(name, [str(path), *options, *arguments], environment)


def test_all_stages_run_and_are_summarized(tmp_path, capfd):
    chosen = [
        stage(tmp_path, "mixed", MIXED, "-p", "xdist", "-n", "2"),
        stage(tmp_path, "import", "import no_such_module\n"),
        stage(tmp_path, "none", ""),
        stage(tmp_path, "crash", "import os\n\ndef test_crash():\n    os._exit(7)\n"),
        stage(tmp_path, "passes", PASSES),
    ]
    assert stages.run(chosen, tmp_path / "results") == 1
    printed = capfd.readouterr().out.splitlines()
    assert printed[-6:] == [
        "FAILED mixed: test_mixed.py::TestGroup::test_some[2.5]",
        "FAILED mixed: test_mixed.py::test_error",
        "FAILED import: test_import.py",
        "FAILED none: (pytest exited with status 5)",
        "FAILED crash: (pytest exited with status 7)",
        "2 passed, 5 failed, 1 skipped",
    ]
    (row,) = [text for text in printed if text.startswith("mixed ")]
    assert row.split()[2:] == ["s", "1", "passed,", "2", "failed,", "1", "skipped"]


def test_results_of_earlier_runs_do_not_count(tmp_path, capfd):
    case = '<testcase classname="test_passes" name="test_environment" file="test_passes.py"/>'
    (tmp_path / "passes.xml").write_text(f"<testsuite>{case}</testsuite>")
    assert stages.run([Stage("passes", ["--no-such-option"], {})], tmp_path) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_an_interrupt_stops_the_run(tmp_path):
    interrupted = stage(tmp_path, "one", "def test_one():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        stages.run([interrupted, stage(tmp_path, "two", PASSES)], tmp_path / "results")
    assert not (tmp_path / "results/two.xml").exists()


def test_an_unknown_stage_is_an_error_that_lists_all():
    done = commands.run(sys.executable, stages.__file__, "no-such-stage")
    assert done.returncode == 2 and "kernels, rest" in done.stderr
