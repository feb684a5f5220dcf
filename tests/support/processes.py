"""A pool of processes that run functions together, as the ranks of a gloo process group."""

from __future__ import annotations

import contextlib
import datetime
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by the process from which all ranks are forked.
_IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "fused_attn", "fused_attn.distributed"]
TIMEOUT = 120.0  # seconds, for a collective or for the answer of a rank


class RankError(RuntimeError):
    """Exception of a rank, whose traceback the message contains."""


class Processes:
    """Ranks that are started once and run one function after another.

    Functions must be importable by name, with picklable arguments and results: define them in a
    module of tests/support, which the ranks import.

    Args:
        world_size: number of ranks.
        folder: an empty folder, for the store of the process group.
        timeout: timeout of the process group, in seconds.
    """

    def __init__(self, world_size: int, folder: Path, timeout: float = TIMEOUT) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self.pipes = []
        self.processes = []
        for rank in range(world_size):
            pipe, other = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, str(folder / "store"), timeout, other),
                daemon=True,
            )
            process.start()
            other.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call function(*args) on all ranks at once and return their results, by rank.

        Raises:
            RankError: a rank raised an exception.
        """
        results = self.outcomes(function, *args)
        for rank, (error, _) in enumerate(results):
            if error:
                raise RankError(f"rank {rank} of {len(results)}:\n{error}")
        return [result for _, result in results]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """Call function(*args) on all ranks and return (traceback or "", result) of each."""
        for pipe in self.pipes:
            pipe.send((function, args))
        return [_received(pipe) for pipe in self.pipes]

    def close(self) -> None:
        """Stop all ranks."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _received(pipe: Any) -> tuple[str, Any]:
    try:
        if not pipe.poll(2 * TIMEOUT):
            return "no answer within the time limit", None
        return pipe.recv()
    except (EOFError, OSError):
        return "the process died", None


def _serve(rank: int, world_size: int, store: str, timeout: float, pipe: Any) -> None:
    """Run the functions that the pipe delivers, until it delivers None."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send(("", function(*args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
