"""Number of threads of CPU kernels: torch's, or 1 after a fork of a multithreaded process.

OpenMP's threads do not exist in the child of a fork. A parallel region of libgomp then waits for
them forever, in torch's kernels and in ours. This affects servers that load a model and warm it up
before they fork. The child therefore runs on one thread, in torch as well, and warns at its first
call of a kernel.
"""

from __future__ import annotations

import os
import warnings

import torch

_has_pool = False  # kernels ran on several threads in this process
_is_alone = False  # forked from a process with such threads
_warned = False


def num_threads() -> int:
    """Return the number of threads that a kernel may use: torch's, or 1 after a fork."""
    global _has_pool
    if _is_alone:
        return _alone()
    threads = torch.get_num_threads()
    if threads > 1:
        _has_pool = True
    return threads


def _alone() -> int:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "this process was forked after its parent had run kernels on several threads, which do"
            " not survive a fork, so it runs kernels on one thread. Start processes with spawn, or"
            " fork before the first call, or call torch.set_num_threads(1) before it",
            RuntimeWarning,
            stacklevel=2,
        )
    return 1


def _after_fork() -> None:
    global _is_alone
    if _has_pool:
        _is_alone = True
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)
