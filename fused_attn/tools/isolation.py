"""Worker processes, so that a crash or an illegal memory access on a GPU costs one step only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_PARENT_OF_PACKAGE = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """The worker process died, or was killed after the time limit, during a step."""


class Worker:
    """A process that runs functions one at a time. It starts on first use, and anew after `stop`.

    Functions, arguments and results are pickled. A function must not raise.

    Args:
        limit: seconds after which a step is given up.
        context: function without arguments that returns a context for all steps, or None.
    """

    def __init__(
        self, limit: float, context: Callable[[], AbstractContextManager[Any]] | None = None
    ) -> None:
        self._limit, self._context = limit, context
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return function(*args), computed in the process.

        Raises:
            WorkerError: the process died or took too long. The next call starts another one.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._connection is not None
        try:
            self._connection.send((function, args))
            self._connection.recv()  # when the function begins: importing torch takes seconds
            if not self._connection.poll(self._limit):
                raise WorkerError(f"no result after {self._limit:.0f} s")
            result: T = self._connection.recv()
            return result
        except (EOFError, ConnectionError):
            raise WorkerError(f"the process died ({_death(self._process.wait())})") from None
        finally:
            if sys.exc_info()[0] is not None:
                self.stop()

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self) -> None:
        # Not multiprocessing.Process, which would import the main module of the program again.
        self._connection, other = Pipe()
        code = f"from fused_attn.tools import isolation; isolation.serve({other.fileno()})"
        path = os.pathsep.join([str(_PARENT_OF_PACKAGE), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[other.fileno()],
            env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)},
        )
        other.close()
        self._connection.send(self._context)


def serve(file_descriptor: int) -> None:
    """Run the functions that arrive on a connection, until its other end is closed."""
    connection = Connection(file_descriptor)
    try:
        context = connection.recv()
        if context is None:
            _answer(connection)
        else:
            with context():
                _answer(connection)
    except (EOFError, ConnectionError):
        pass


def _answer(connection: Connection) -> None:
    while True:
        function, args = connection.recv()
        connection.send(None)
        connection.send(function(*args))


def _death(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
