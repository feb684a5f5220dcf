"""pytest plugin that runs the collected tests on generated mutants, each in a forked process.

mutant_runs.py starts it (-p mutant_tests), with the path of its arguments in MUTANTS_RUN.

First, all tests run without a mutant, to record which mutants each of them reaches. On a mutant,
only those run that reach it, until one fails.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import linecache
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from mutant_sources import MAX_MUTANTS, ROOT, Mutant

from fused_attn.integrations.bytecode import codes

MEMORY = 12 << 30  # address space of a process; torch alone takes several GB
Send = Callable[[object], None]


class Compiled:
    """The mutants of a C++ module (mutant_runs.build)."""

    def __init__(self, module: str) -> None:
        library = ctypes.CDLL(module)
        self.mutant = ctypes.c_int.in_dll(library, "fused_attn_mutant")
        self.marks = (ctypes.c_int * MAX_MUTANTS).in_dll(library, "fused_attn_reached")

    def turn_on(self, number: int) -> None:
        self.mutant.value = number

    def record(self) -> None:
        pass

    def reached(self) -> list[int]:
        numbers = [number for number, mark in enumerate(self.marks) if mark]
        ctypes.memset(self.marks, 0, ctypes.sizeof(self.marks))
        return numbers


class Interpreted:
    """The mutants of Python files: other code objects of the functions that exist."""

    def __init__(self, mutants: dict[int, Mutant]) -> None:
        self.mutants = mutants
        self.seen: set[int] = set()

    def turn_on(self, number: int) -> None:
        self._replace([self.mutants[number]])

    def record(self) -> None:
        """Make each expression that has a mutant record that it is evaluated."""
        builtins._seen = self.seen  # type: ignore[attr-defined]
        probes = []
        for number, m in self.mutants.items():
            line = (ROOT / m.path).read_text().splitlines()[m.line - 1]
            text = f"(_seen.add({number}) or ({line[m.begin : m.end]}))"
            probes.append(m._replace(text=text))
        self._replace(probes)

    def _replace(self, mutants: list[Mutant]) -> None:
        changed = {}
        for path in {mutant.path for mutant in mutants}:
            importlib.import_module(path.removesuffix(".py").replace("/", "."))
            text, name = (ROOT / path).read_text(), str(ROOT / path)
            lines = text.splitlines(keepends=True)
            before = set(codes(compile(text, name, "exec")))
            for mutant in mutants:
                if mutant.path == path:
                    lines[mutant.line - 1] = mutant.apply(lines[mutant.line - 1])
            # Triton's interpreter compiles the source again. linecache does not check entries whose
            # time is None.
            linecache.cache[name] = (len(text), None, lines, name)
            after = set(codes(compile("".join(lines), name, "exec")))
            changed |= {_place(code): code for code in after - before}
        for function in gc.get_objects():
            if isinstance(function, FunctionType) and _place(function.__code__) in changed:
                function.__code__ = changed[_place(function.__code__)]

    def reached(self) -> list[int]:
        numbers = sorted(self.seen)
        self.seen.clear()
        return numbers


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


def pytest_configure(config: pytest.Config) -> None:
    arguments = json.loads(Path(os.environ["MUTANTS_RUN"]).read_text())
    config.pluginmanager.register(Runs(**arguments))


class Runs:
    """The plugin.

    Args:
        mutants: number and fields of each mutant.
        module: of C++ mutants.
        results: file to which a line is appended for each mutant: its number, the test that kills
            it (None: it survives; "": no test reaches it), and the seconds that its tests took.
        baseline: file with what the tests reach, which is written unless it exists.
        limit: seconds of tests that run on a mutant at most.
    """

    def __init__(
        self,
        mutants: list[tuple[int, list]],
        module: str | None,
        results: str,
        baseline: str,
        limit: float,
    ) -> None:
        self.mutants = {number: Mutant(*fields) for number, fields in mutants}
        self.module, self.limit = module, limit
        self.results, self.baseline = Path(results), Path(baseline)
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        switch = Compiled(self.module) if self.module else Interpreted(self.mutants)
        items = {item.nodeid: item for item in session.items}

        def run(names: list[str], send: Send, recording: bool) -> None:
            if recording:
                switch.record()
            for number, name in enumerate(names):
                send({"begins": name})
                switch.reached()
                begin = time.monotonic()
                following = items[names[number + 1]] if number + 1 < len(names) else None
                protocol = session.config.hook.pytest_runtest_protocol
                self.failed = False
                protocol(item=items[name], nextitem=following)
                took = time.monotonic() - begin
                send({"ends": name, "seconds": took, "failed": self.failed,
                      "reached": switch.reached()})  # fmt: skip
                if self.failed and not recording:
                    break

        # The message of a failed comparison uses it, and its first call imports for seconds.
        torch.unravel_index(torch.tensor(0), (1, 1))
        if not self.baseline.exists():
            messages = in_child(lambda send: run(list(items), send, True), lambda name: 600.0)
            if messages and "died" in messages[-1]:  # the tests after it do not count
                print(f"without mutants, {messages[-1]['of']} {messages[-1]['died']}")
            self.baseline.write_text(json.dumps(messages))
        baseline = [
            message
            for message in json.loads(self.baseline.read_text())
            if message.get("failed") is False and message["ends"] in items
        ]
        seconds = {message["ends"]: message["seconds"] for message in baseline}
        print(f"{len(baseline)} of {len(items)} tests pass in {sum(seconds.values()):.0f} s")
        for number in self.mutants:
            total, chosen = 0.0, []
            tests = [message["ends"] for message in baseline if number in message["reached"]]
            for test in _varied(tests, seconds):
                total += seconds[test]
                if total < self.limit or not chosen:
                    chosen.append(test)

            def mutated(send: Send, number: int = number, chosen: list[str] = chosen) -> None:
                switch.turn_on(number)
                run(chosen, send, False)

            begin = time.monotonic()
            killer = None if chosen else ""
            limits = {"": 60.0} | {name: 60 + 20 * seconds[name] for name in chosen}
            messages = in_child(mutated, limits.__getitem__) if chosen else []
            for message in messages:
                assert "died" not in message or message["of"], "the tests cannot run"
                if message.get("failed") or "died" in message:
                    killer = message.get("ends") or f"{message['of']} ({message['died']})"
            result = [number, killer, round(time.monotonic() - begin, 1)]
            with self.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{number} {self.mutants[number][:3]}: {killer}", flush=True)
        return True


def _varied(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """Sort tests by time, but take one of each function before the second of any."""
    taken: Counter[str] = Counter()
    ranks = {}
    for test in sorted(tests, key=lambda test: seconds[test]):
        function = test.partition("[")[0]
        ranks[test] = (taken[function], seconds[test])
        taken[function] += 1
    return sorted(ranks, key=lambda test: ranks[test])


def in_child(work: Callable[[Send], None], limit: Callable[[str], float]) -> list[Any]:
    """Run work(send) in a forked process, and return what it sends.

    The process ends if nothing arrives within the limit, in seconds, of the test that began.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            work(lambda message: os.write(sending, (json.dumps(message) + "\n").encode()))
            os.write(sending, b'"finished"\n')
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    messages: list[Any] = []
    rest, began, died = b"", "", ""
    while not (messages and messages[-1] == "finished"):
        ready, _, _ = select.select([receiving], [], [], limit(began))
        data = os.read(receiving, 1 << 16) if ready else b""
        if not data:
            died = "dies" if ready else "hangs"
            break
        *lines, rest = (rest + data).split(b"\n")
        messages += map(json.loads, lines)
        begun = (m for m in reversed(messages) if isinstance(m, dict) and "begins" in m)
        began = next(begun, {"begins": ""})["begins"]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(receiving)
    return [*messages, {"died": died, "of": began}] if died else messages[:-1]
