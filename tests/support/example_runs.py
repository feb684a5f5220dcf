"""Runner that starts the examples with --smoke, in processes without network access."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, run

for _module in ("matplotlib", "rich", "sacrebleu", "safetensors", "tokenizers"):
    pytest.importorskip(_module)

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))  # tests import the examples' modules
# Proxy and offline settings that make downloads fail in every library that honors them.
NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


def run_example(name: str, folder: Path, *args: str) -> tuple[str, dict[str, Any]]:
    """Run `examples/<name>.py --smoke`; return its stdout and the figures from its JSON file.

    The test fails if the exit status is not 0.
    """
    command = [sys.executable, EXAMPLES / f"{name}.py", "--smoke", "--output", folder]
    done = run(*command, *args, encoding="utf-8", timeout=300, env=os.environ | NO_NETWORK)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / f"{name}.json").read_text("utf-8"))["figures"]
