"""Arguments that several `fused-attn` commands share, their types, and JSON output."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from fused_attn.backends.registry import BACKENDS

OK, FAILED, USAGE = 0, 1, 2  # exit statuses


def add_backend(command: argparse.ArgumentParser, what: str) -> None:
    """Add --backend with one backend."""
    command.add_argument("--backend", choices=list(BACKENDS), help=what)


def add_device(command: argparse.ArgumentParser) -> None:
    """Add --device, whose value `use_device` accepts."""
    command.add_argument(
        "--device", type=_device, default="cpu", help="cpu (the default), cuda, cuda:1, ..."
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """Add --json, whose value `write_json` accepts."""
    command.add_argument(
        "--json", type=output, metavar="FILE", help="write JSON; - for stdout instead of the tables"
    )


def add_png(command: argparse.ArgumentParser) -> None:
    """Add --png with a path."""
    command.add_argument("--png", type=output, metavar="FILE", help="write a plot with matplotlib")


def positive(text: str) -> int:
    """Convert an argument to a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def output(text: str) -> Path:
    """Convert an argument to the path of a file that can be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text!r}")
    return path


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def use_device(name: str) -> torch.device:
    """Return the device of this name; make a GPU with an index the current one."""
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        elif not torch.cuda.is_available():
            raise ValueError("--device cuda requires a GPU, but torch finds none")
    return device


def write_json(path: Path | None, facts: dict[str, Any]) -> bool:
    """Write facts as JSON to `path`, if it is not None. Return True if `path` is stdout.

    After True, the caller must not print anything else to stdout. Non-finite floats, which JSON
    cannot represent, are written as strings.
    """
    if path is None:
        return False
    text = json.dumps(_strict(facts), indent=1)
    if path == Path("-"):
        print(text)
        return True
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        path.write_text(text + "\n")
        return False
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)  # atomic, so no reader finds a partial file
    return False


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def one_line(message: object) -> str:
    """Return an exception's message on one line, with its type unless it is an argument error."""
    text = " ".join(str(message).split())
    if isinstance(message, (ValueError, NotImplementedError)) and text:
        return text
    return f"{type(message).__name__}: {text}" if isinstance(message, Exception) else text
