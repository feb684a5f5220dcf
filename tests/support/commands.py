"""Commands that tests run as child processes."""

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with options of subprocess.run, and capture its output as text."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


def output_of(*command: Any, **options: Any) -> str:
    """Return stdout and stderr of a command, whose exit status must be 0."""
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
