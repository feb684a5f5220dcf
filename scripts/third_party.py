"""Compare models of PyPI libraries with and without fused_attn: `make third-party`.

Each model runs in a separate process, which records numerics, kernel calls and times. The exit
status is 1 if a model fails or violates the numerics contract, or if no model called a kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.abc
import importlib.machinery
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pages
import torch
from third_party_models import LIBRARIES, Library
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

import fused_attn
from fused_attn.tools import contract, doctor, timing
from fused_attn.tools.compare import RUNS
from fused_attn.tools.contract import Verdict
from fused_attn.tools.recording import copied, float_tensors

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "build/third-party"  # folder in which `make third-party` installs the packages
RESULTS = ROOT / "benchmarks/results/third-party.json"
PAGE = ROOT / "docs/third-party.md"
SECONDS = 600  # time limit per model
ROUNDS = 9
WAYS = {
    "compile": "`compile_pass()`",
    "enable": "`swap_modules` and `enable()`",
    "compile swapped": "both, then torch.compile",
}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of a stub of torchvision, of which PyPI has no build for CPU-only torch.

    The models here import torchvision's transforms and data sets, but do not call them.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the stub has no code."""


class _AnyAttribute(type):
    """Metaclass that makes every attribute of a class exist; its value is its name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(ModuleType):
    """Module in which every name exists and is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {})


# ---- one model ----------------------------------------------------------------------------------


def measure(library: Library, rounds: int) -> dict[str, Any]:
    """Run a model with and without fused_attn; return its record, with numerics and times."""
    if library.torchvision and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Absent())
    torch.manual_seed(0)
    model, args = library.make()
    model.eval()
    run = {"compile": _compiled, "enable": _enabled, "compile swapped": _compiled_swapped}
    torch.set_num_threads(1)
    found = run[library.way](model, args, rounds)
    version = metadata.version(library.package)
    return {"package": library.package, "version": version, "model": library.model,
            "way": library.way, **found}  # fmt: skip


def _enabled(model: Module, args: Any, rounds: int) -> dict[str, Any]:
    report = fused_attn.compare(model, *args, enable=True)
    fused = copy.deepcopy(model)
    swap = fused_attn.swap_modules(fused)
    calls = _kernel_calls(lambda: _forward(fused, args))
    times = _times({"before": (model, False), "after": (fused, True)}, args, rounds)
    return {
        "ok": report.ok, "numerics": report.verdict(), "calls": calls,
        "report": str(swap).splitlines()[0], "milliseconds": times,
    }  # fmt: skip


def _compiled_swapped(model: Module, args: Any, rounds: int) -> dict[str, Any]:
    found = _enabled(model, args, rounds)
    fused = copy.deepcopy(model)
    fused_attn.swap_modules(fused)
    ways = {"before": (torch.compile(model), False), "after": (torch.compile(fused), True)}
    return found | {"milliseconds": _times(ways, args, rounds)}


def _compiled(model: Module, args: Any, rounds: int) -> dict[str, Any]:
    attention = fused_attn.compile_pass()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    inputs = {torch.float64: (copy.deepcopy(model).double(), copied(args, torch.float64))}
    inputs[torch.float32] = (model, args)

    def call(*parameters: Tensor) -> list[Tensor]:
        made, given = inputs[parameters[0].dtype]
        out = functional_call(made, dict(zip(names, parameters, strict=True)), given)
        return [tensor for _, tensor in float_tensors(out, "output")]

    parameters = {name: dict(model.named_parameters())[name] for name in names}
    outs = [out.sum() for out in call(*parameters.values())]
    grads = torch.autograd.grad(outs, list(parameters.values()), allow_unused=True)
    used = {name for name, grad in zip(names, grads, strict=True) if grad is not None}
    operands = {name: p.detach() for name, p in parameters.items() if name in used}
    unused = {name: p for name, p in parameters.items() if name not in used}
    names[:] = [*operands, *unused]

    def with_unused(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Tensor) -> Any:
            return function(*given, *(p.detach().to(given[0].dtype) for p in unused.values()))

        return run

    checked = [
        contract.check(
            with_unused(torch.compile(call, options=options)), with_unused(call), operands,
            torch.float32, gradients=True, runs=RUNS,
        )
        for options in (attention.options, {})
    ]  # fmt: skip
    ok, numerics = _judged(*checked)
    attention.found.clear()
    with_pass = torch.compile(copy.deepcopy(model), options=attention.options)
    ways = {"before": (torch.compile(copy.deepcopy(model)), False), "after": (with_pass, False)}
    calls = _kernel_calls(lambda: _forward(with_pass, args))
    said = str(attention).splitlines()[0]
    times = _times(ways, args, rounds)
    return {
        "ok": ok, "numerics": numerics, "calls": calls, "report": said,
        "milliseconds": times,
    }  # fmt: skip


def _judged(fused: Verdict, plain: Verdict) -> tuple[bool, str]:
    """Return the verdict on a compiled model with the pass, and its description.

    If torch.compile alone also violates the contract for a result, the result may exceed the error
    of torch.compile alone by the contract's factor.
    """
    beyond = [(f, p) for f, p in zip(fused.findings, plain.findings, strict=True) if not f.ok]
    ok = all(f.error <= contract.factor_of(f.name.startswith("grad")) * p.error for f, p in beyond)
    said = f"within the contract: {len(fused.findings) - len(beyond)} outputs and gradients"
    if beyond:
        said += f"; {len(beyond)} outside" + (", as with torch.compile alone" if ok else ": WRONG")
    return ok, said


def _kernel_calls(forward: Callable[[], Any]) -> int:
    """Return the number of calls of the CPU attention forward kernel in a forward of a model."""
    with fused_attn.enabled():
        forward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            forward()
    events = profile.key_averages()
    return sum(e.count for e in events if e.key == "fused_attn::cpp::attention_fwd")


@torch.no_grad()
def _forward(model: Callable[..., Any], args: Any) -> Any:
    return model(*args)


def _times(ways: dict[str, tuple[Any, bool]], args: Any, rounds: int) -> dict[str, Any]:
    """Return median milliseconds on one thread for the forward and for a training step."""

    def step(model: Any) -> None:
        outs = [t for _, t in float_tensors(model(*args), "out") if t.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])

    found = {}
    for name, run in (("forward", lambda model: _forward(model, args)), ("training", step)):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, (model, enable) in ways.items():
                # Enter enabled() outside the timing: switching takes 1 ms.
                with fused_attn.enabled() if enable else contextlib.nullcontext():
                    taken = timing.cpu_seconds(functools.partial(run, model))
                if turn:  # skip the first round, which compiles
                    seconds[way].append(taken)
        found[name] = {way: round(1e3 * statistics.median(s), 3) for way, s in seconds.items()}
    return found


# ---- all ----------------------------------------------------------------------------------------


def _records(libraries: list[Library], rounds: int) -> Iterator[dict[str, Any]]:
    for library in libraries:
        command = [sys.executable, __file__, "--one", library.key, "--rounds", str(rounds)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, 1, "", f"took more than {SECONDS} s")
        if done.returncode:
            error = (done.stderr.strip().splitlines() or ["no output"])[-1]
            record = {"package": library.package, "model": library.model, "ok": False,
                      "numerics": error, "calls": 0}  # fmt: skip
        else:
            record = json.loads(done.stdout.splitlines()[-1])
        print(f"{library.key}: {record['numerics']}; {record['calls']} calls", flush=True)
        yield record


def table(results: dict[str, Any]) -> str:
    """Return the table of results as Markdown."""
    machine = results["machine"]
    rows = [
        f"{machine['cpu']}, one thread, `{machine['isa']}` kernels, torch "
        f"{results['versions']['torch']}, float32, random weights.", "",
        "| library | model | method | report | kernel calls per forward | numerics | forward, ms: "
        "before, after | training, ms: before, after |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for record in results["records"]:
        cells = [f"{record['package']} {record['version']}", record["model"]]
        cells += [WAYS[record["way"]], record["report"], str(record["calls"]), record["numerics"]]
        for times in record["milliseconds"].values():
            ratio = times["before"] / times["after"]
            cells.append(f"{times['before']:.4g}, {times['after']:.4g} ({ratio:.2f}x)")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def write(records: list[dict[str, Any]]) -> None:
    """Merge new records into the results file, and update the table on the page."""
    known = json.loads(RESULTS.read_text())["records"] if RESULTS.exists() else []
    merged = {(r["package"], r["model"]): r for r in [*known, *records]}
    order = {(library.package, library.model): i for i, library in enumerate(LIBRARIES)}
    kept = sorted((key for key in merged if key in order), key=order.__getitem__)
    facts = {"versions": doctor.versions(), "machine": doctor.machine()}
    facts["records"] = [merged[key] for key in kept]
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
    page = pages.replaced(PAGE.read_text("utf-8"), "third-party", table(facts))
    PAGE.write_text(page, "utf-8")


def main() -> int:
    """Measure the models of all packages, or of those named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "packages", nargs="*", help="of which the models are run, or models; default: all"
    )
    parser.add_argument("--one", help="a model in this process, its record as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    sys.path.insert(0, str(PACKAGES))
    if options.one:
        (library,) = (library for library in LIBRARIES if library.key == options.one)
        print(json.dumps(measure(library, options.rounds)))
        return 0
    names = options.packages or [library.package for library in LIBRARIES]
    chosen = [lib for lib in LIBRARIES if {lib.package, lib.key} & set(names)]
    records = list(_records(chosen, options.rounds))
    good = [record for record in records if record["ok"]]
    write(good)
    return 0 if len(good) == len(records) and any(record["calls"] for record in good) else 1


if __name__ == "__main__":
    sys.exit(main())
