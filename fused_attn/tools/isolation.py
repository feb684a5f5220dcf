"""Worker processes, so that a crash or an illegal memory access on a GPU fails only one step."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

T = TypeVar("T")
_SPAWN = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process


class WorkerError(RuntimeError):
    """The worker process died, or was killed after the time limit, during a step."""


class Worker:
    """A process that runs functions one at a time. It starts on first use, and again after `stop`.

    Functions, arguments and results are pickled. A function must not raise.

    Args:
        limit: time limit of a step, in seconds.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._running: tuple[SpawnProcess, Connection] | None = None

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return function(*args), computed in the process.

        Raises:
            WorkerError: the process died or took too long. The next call starts another one.
        """
        process, connection = self._running = self._running or self._start()
        try:
            connection.send((function, args))
            connection.recv()  # wait for the start: importing torch takes seconds
            if connection.poll(self._limit):
                result: T = connection.recv()
                return result
            why = f"no result after {self._limit:.0f} s"
        except (EOFError, ConnectionError):
            process.join()
            why = f"the process died ({_death(process.exitcode or 0)})"
        self.stop()
        raise WorkerError(why)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._running is not None:
            process, connection = self._running
            connection.close()
            process.kill()
            process.join()
        self._running = None

    def _start(self) -> tuple[SpawnProcess, Connection]:
        connection, other = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(other,), daemon=True)
        process.start()
        other.close()
        return process, connection


def _serve(connection: Connection) -> None:
    """Run the functions that arrive on a connection, until its other end is closed."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, args = connection.recv()
            connection.send(None)
            connection.send(function(*args))


def _death(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
