"""Ranks of a process group or device mesh, and the communication between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Mesh = DeviceMesh | dist.ProcessGroup | None


@dataclass(frozen=True)
class Ranks:
    """A process group, and the index of this process in it.

    Attributes:
        group: the process group.
        rank: index of this process in the group.
        size: number of processes.
    """

    group: Any  # a dist.ProcessGroup, or None for a single rank without communication
    rank: int
    size: int

    @staticmethod
    def of_group(group: Any) -> Ranks:
        """Return the ranks of a process group."""
        return Ranks(group, dist.get_rank(group), dist.get_world_size(group))

    def global_rank(self, rank: int) -> int:
        """Return the index of a process of the group among all processes."""
        return dist.get_global_rank(self.group, rank % self.size)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors that the ranks pass, by rank. All must have the same shape."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with that of rank 0 of the group, and return it."""
        dist.broadcast(tensor, self.global_rank(0), group=self.group)
        return tensor


def ranks_of(mesh: Mesh) -> list[Ranks]:
    """Return the ranks of each dimension of a mesh.

    Args:
        mesh: a DeviceMesh with one or two dimensions, a process group, or None for all processes.

    Raises:
        ValueError: the mesh has more than two dimensions, or this process is not part of it.
        TypeError: mesh is none of these.
        RuntimeError: there is no default process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialized: call init_process_group")
    if mesh is None:
        return [Ranks.of_group(dist.group.WORLD)]
    if isinstance(mesh, dist.ProcessGroup):
        return [Ranks.of_group(mesh)]
    if not isinstance(mesh, DeviceMesh):
        expected = "a DeviceMesh, a process group or None"
        raise TypeError(f"mesh must be {expected}, got {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(f"mesh must have 1 or 2 dimensions, got {mesh.ndim}: pass a slice of it")
    if mesh.get_coordinate() is None:
        raise ValueError("mesh must contain this process")
    return [Ranks.of_group(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def size_of(groups: Sequence[Ranks]) -> int:
    """Return the number of ranks of a mesh, given the ranks of each of its dimensions."""
    return math.prod(ranks.size for ranks in groups)


def index_of(groups: Sequence[Ranks]) -> int:
    """Return the index of this process in a mesh; the last dimension varies fastest."""
    index = 0
    for ranks in groups:
        index = index * ranks.size + ranks.rank
    return index


def gather_on_mesh(
    groups: Sequence[Ranks], values: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Return the integers that each rank of a mesh passes, in the order of the mesh.

    Args:
        groups: the ranks of each dimension of the mesh.
        values: integers, the same number on all ranks.
        device: device that a group uses if it has no CPU backend. A group with "gloo" for the CPU,
            which init_process_group() creates by default, does not wait for the GPU.
    """
    rows = torch.tensor([values], dtype=torch.int64)
    for ranks in reversed(groups):
        on_cpu = torch.device("cpu") in getattr(ranks.group, "_device_types", ())
        rows = torch.cat(ranks.gather(rows.to("cpu" if on_cpu else device)))
    return rows.tolist()


@dataclass
class Transfer:
    """Messages in flight, sent and received.

    Attributes:
        received: the tensor to receive, which is valid after `wait`.
    """

    received: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """Wait for all messages and return the received tensor.

        Raises:
            RuntimeError: a rank failed, or the timeout of the process group elapsed.
        """
        for work in self.works:
            work.wait()
        return self.received


def start_transfer(
    ranks: Ranks, *, to: int, sent: Tensor, source: int, received: Tensor
) -> Transfer:
    """Start to send a tensor to one rank, and to receive one from another rank.

    Args:
        to, source: ranks of the group, modulo its size.
        sent: contiguous tensor; an empty one is not sent.
        received: contiguous tensor to overwrite; an empty one is not received.
    """
    messages = []
    if sent.numel():
        messages.append(dist.P2POp(dist.isend, sent, ranks.global_rank(to), ranks.group))
    if received.numel():
        messages.append(dist.P2POp(dist.irecv, received, ranks.global_rank(source), ranks.group))
    return Transfer(received, sent, dist.batch_isend_irecv(messages) if messages else [])
