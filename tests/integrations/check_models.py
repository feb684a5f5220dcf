"""Every model type of transformers, before and after the swap: `make models-check`.

Each type is judged in a process of its own, with a limit of time. The exit status is 1 if one
FAILS: it crashes, differs from eager where that is finite, or is reported as fused and is not.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import hf_zoo
import torch
import transformers

SECONDS = 180


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all of them without any")
    parser.add_argument("--json", type=Path, help="where the verdicts go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    types = arguments.types or sorted(transformers.CONFIG_MAPPING.keys())
    hf_zoo.judge("llama")  # whatever the library imports late is imported for all
    verdicts = {}
    for number, model_type in enumerate(types, 1):
        verdicts[model_type] = verdict = _judged(model_type)
        print(f"[{number}/{len(types)}] {model_type:32} {verdict}", flush=True)
        if arguments.json:
            _write(arguments.json, verdicts)
    counts = collections.Counter(v.verdict for v in verdicts.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts["FAILS"] else 0


def _judged(model_type: str) -> hf_zoo.Verdict:
    """The verdict of a process that was forked off: imports are done, and a crash is its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return receiver.recv()
        return hf_zoo.Verdict("not run", f"longer than {SECONDS} s")
    except EOFError:
        process.join()
        return hf_zoo.Verdict("FAILS", f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(model_type: str, sender: Connection) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (advice of the library on made-up configs)
    try:
        verdict = hf_zoo.judge(model_type)
    except Exception as error:
        verdict = hf_zoo.Verdict("FAILS", f"{type(error).__name__}: {error}")
    sender.send(verdict)


def _write(path: Path, verdicts: dict[str, hf_zoo.Verdict]) -> None:
    names = ("fused-attn", "transformers", "torch")
    counts = collections.Counter(v.verdict for v in verdicts.values())
    found = {
        "versions": {name: metadata.version(name) for name in names},
        "counts": dict(counts.most_common()),
        "verdicts": {name: str(verdict) for name, verdict in verdicts.items()},
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
