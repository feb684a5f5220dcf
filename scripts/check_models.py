"""Compare every model type of transformers before and after the swap: `make models-check`.

Each type runs in a separate process with a time limit. The exit status is 1 if a type FAILS, or if
it agrees in the committed verdicts but no longer does. A type FAILS if it crashes, if it differs
from eager where eager is finite, or if it is reported as fused but is not.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import hf_zoo
import pages
import torch
import transformers

from fused_attn.tools import doctor

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "benchmarks/results/models-check.json"
PARTIAL = ROOT / "build/models-check.json"  # verdicts of an interrupted run, for --resume
PAGE = ROOT / "docs/models.md"
SECONDS = 180

# Meaning of each verdict, in the order of the table in docs/models.md.
MEANINGS = {
    "agrees": "matches eager, forward and backward",
    "agrees with sdpa": "matches the library's sdpa attention, which differs from eager",
    "declined": "runs its original attention; the report states the reason",
    "no attention": "runs unchanged: no attention uses the library's interface",
    "eager NaN": "returns NaN or infinity, as with eager attention",
    "no model": "not applicable: the type is only a component of other models",
    "not run": "unknown: no small config and inputs could be built that run with eager",
    "FAILS": "crashes, differs from eager, or is reported as fused but is not",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", help="model types, separated by commas; all without it")
    parser.add_argument("--resume", action="store_true", help="go on where a run was interrupted")
    parser.add_argument("--write", action="store_true", help="commit-ready: the JSON and the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    types = sorted(transformers.CONFIG_MAPPING.keys())
    if arguments.types:
        types = arguments.types.split(",")
    before = json.loads(COMMITTED.read_text())
    found = json.loads(PARTIAL.read_text()) if arguments.resume and PARTIAL.exists() else {}
    PARTIAL.parent.mkdir(exist_ok=True)
    hf_zoo.judge("llama")  # run the lazy imports once, before the forks
    for number, model_type in enumerate(types, 1):
        if model_type not in found:
            verdict = _judged(model_type)
            found[model_type] = asdict(verdict)
            print(f"[{number}/{len(types)}] {model_type:32} {verdict}", flush=True)
            PARTIAL.write_text(json.dumps(found))
    found = {model_type: found[model_type] for model_type in types}
    PARTIAL.unlink()
    print(counts(found))
    if arguments.write:
        after = merged(before, found)
        COMMITTED.write_text(as_text(after))
        PAGE.write_text(with_summary(PAGE.read_text(), after))
    failing = [f"{name} FAILS" for name in found if found[name]["verdict"] == "FAILS"]
    failing += regressions(before["types"], found)
    print(*failing, sep="\n")
    return 1 if failing else 0


# ---- one type -----------------------------------------------------------------------------------


def _judged(model_type: str) -> hf_zoo.Verdict:
    """Return the verdict of a type from a forked process, which inherits imports and may crash."""
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


# ---- all verdicts -------------------------------------------------------------------------------


def regressions(before: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return one message for each type that agreed before and does not now."""
    good = {"agrees": ["agrees"], "agrees with sdpa": ["agrees", "agrees with sdpa"]}
    return [
        f"{name} agreed before, now: {entry['verdict']}: {entry['detail']}"
        for name, entry in found.items()
        if (former := before.get(name, {}).get("verdict")) in good
        and entry["verdict"] not in good[former]
    ]


def counts(types: dict[str, Any]) -> str:
    """Return the number of types per verdict as text."""
    counted = collections.Counter(entry["verdict"] for entry in types.values())
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in MEANINGS if counted[verdict])


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Merge new verdicts into the committed ones.

    Committed entries from another machine or other versions are labeled with these.
    """
    names = ("fused-attn", "transformers", "torch")
    versions = {name: metadata.version(name) for name in names}
    run: dict[str, Any] = {"machine": doctor.machine(), "versions": versions}
    former = {key: before[key] for key in run}
    known = transformers.CONFIG_MAPPING.keys()
    others = {
        name: entry if former == run else {**former, **entry}
        for name, entry in before["types"].items()
        if name not in found and name in known
    }
    types = dict(sorted({**others, **found}.items()))
    return {**run, "counts": counts(types), "types": types}


def as_text(verdicts: dict[str, Any]) -> str:
    """Return the verdicts as JSON, with one line per type."""
    head = {key: value for key, value in verdicts.items() if key != "types"}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in verdicts["types"].items()]
    start = json.dumps(head, indent=1).removesuffix("\n}")
    return start + ',\n "types": {\n' + ",\n".join(lines) + "\n }\n}\n"


def with_summary(page: str, verdicts: dict[str, Any]) -> str:
    """Return the page with the table of verdicts between its markers replaced."""
    counted = collections.Counter(entry["verdict"] for entry in verdicts["types"].values())
    versions = ", ".join(f"{name} {version}" for name, version in verdicts["versions"].items())
    cached = sum("cached" in entry["ways"] for entry in verdicts["types"].values())
    left = sum("left-padded" in entry["ways"] for entry in verdicts["types"].values())
    rows = [f"| {name} | {counted[name]} | {meaning} |" for name, meaning in MEANINGS.items()]
    table = [
        f"{len(verdicts['types'])} model types, with {versions}:",
        "",
        "| verdict | types | what the swapped model does |",
        "|---|---|---|",
        *rows,
        "",
        f"Of those that agree, {left} were also run with left padding, and {cached} with one new",
        "token and a cache.",
    ]
    return pages.replaced(page, "models-check", "\n".join(table))


if __name__ == "__main__":
    raise SystemExit(main())
