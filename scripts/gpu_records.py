"""Pytest plugin for GPUs: a record of each test as it ends, time limits, new workers after crashes.

    pytest -p gpu_records -n 8 --records FILE --unit-seconds 60 ...

Each line of FILE is a JSON object: a record of scripts/gpu_session.py, or the number of tests. A
worker of pytest-xdist ends itself when a test takes too long, or leaves the GPU's context broken,
so that all later tests of the process would fail; pytest-xdist then starts another one. Tracebacks
go to FILE with the suffix ".log" as they arise, as pytest's own report is lost if it is killed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Errors after which CUDA accepts no further call in a process.
BROKEN = (
    "CUDA error", "illegal memory access", "misaligned address", "unspecified launch failure",
    "illegal instruction",
)  # fmt: skip
PROPERTY = "gpu_record"  # key of the record in user_properties of a report
MESSAGE = 600  # characters of a message that are kept
TRACEBACK = 4000  # characters of a traceback that are kept


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, help="append a JSON line for each test to this file")
    parser.addoption("--unit-seconds", type=float, default=120.0, help="time limit of a test")


def pytest_configure(config: pytest.Config) -> None:
    records = config.getoption("--records")
    limit = config.getoption("--unit-seconds")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Guard(limit, records))
    if records is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(records))


def status_of(error: BaseException) -> str:
    """Return the status of a test that ended with an exception."""
    if isinstance(error, pytest.skip.Exception):
        return "refused" if str(error).startswith("reason: refused") else "skipped"
    if isinstance(error, NotImplementedError):
        return "refused"
    return "wrong" if isinstance(error, AssertionError) else "crash"


class _Guard:
    """Plugin of a worker: reports tests, and ends the worker after a hang or a broken context."""

    def __init__(self, limit: float, records: Path | None) -> None:
        self.limit, self.records = limit, records

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        timer = threading.Timer(self.limit, self.leave, (item, "hang", f"over {self.limit:.0f} s"))
        timer.daemon = True
        timer.start()
        # If native code holds the interpreter's lock, the timer cannot run.
        faulthandler.dump_traceback_later(self.limit + 5.0, exit=True)
        try:
            return (yield)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
        report = yield
        if call.excinfo is not None:
            error = call.excinfo.value
            message = f"{type(error).__name__}: {error}"
            if any(text in message for text in BROKEN):
                self.leave(item, "crash", message)
            report.user_properties.append(
                (PROPERTY, {"status": status_of(error), "message": shortened(message)})
            )
        # pytest-xdist cannot send every object to the main process.
        report.user_properties = json.loads(json.dumps(report.user_properties, default=str))
        return report

    def leave(self, item: pytest.Item, status: str, message: str) -> None:
        """Record why the process ends, and end it. The main process detects its death."""
        print(f"{item.nodeid}: {status}: {shortened(message)}", file=sys.stderr, flush=True)
        if status == "hang":
            faulthandler.dump_traceback(all_threads=True)
        if self.records is not None:
            append(self.records, {"unit": item.nodeid, "status": status, "message": message})
        os._exit(70)


class _Recorder:
    """Plugin of the main process: writes the records of all workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.planned: int | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.plan(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.plan(len(ids))

    def plan(self, count: int) -> None:
        if count and self.planned is None:
            self.planned = count
            append(self.path, {"planned": count})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "crash", 0.0, str(report.longrepr)[-MESSAGE:], {})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        append(self.path, {"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        data = {name: value for name, value in properties.items() if name != PROPERTY}
        own = properties.get(PROPERTY, {})
        if report.when == "call" or report.outcome != "passed":
            status = own.get("status", "ok" if report.passed else "crash")
            message = own.get("message", "" if report.passed else str(report.longrepr))
            self.write(report.nodeid, status, report.duration, message, data)
        if report.failed:
            with open(self.path.with_suffix(".log"), "a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n{report.longreprtext[-TRACEBACK:]}\n\n")

    def write(
        self, unit: str, status: str, seconds: float, message: str, data: dict[str, Any]
    ) -> None:
        record = {"unit": unit, "status": status, "seconds": round(seconds, 3)}
        append(self.path, record | {"message": shortened(message), "data": data})


def shortened(message: str) -> str:
    """Return a message on one line, without its middle if it is long."""
    text = " ".join(message.split())
    half = MESSAGE // 2
    return text if len(text) <= MESSAGE else f"{text[:half]} ... {text[-half:]}"


def append(path: Path, record: dict[str, Any]) -> None:
    """Append a line to a file in one write, so that several processes can share the file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
