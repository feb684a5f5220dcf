"""Comparison of the arguments of all ranks, before they exchange anything else.

Every call sends one message of constant length, even if the rank has an error. An invalid call on
one rank therefore raises an error on all ranks, and none of them hangs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fused_attn.base.torch_state import FLOATS
from fused_attn.distributed.ranks import Ranks, gather_on_mesh

SIZE = 24  # number of integers in a message


def agreed(
    groups: Sequence[Ranks],
    shared: Mapping[str, int],
    own: Mapping[str, int],
    error: Exception | None,
    device: torch.device,
) -> list[dict[str, int]]:
    """Return the `own` values of all ranks of a mesh, in the order of the mesh.

    Args:
        groups: the ranks of each dimension of the mesh.
        shared: named integers that must be equal on all ranks.
        own: named integers that may differ. All ranks must use the same names.
        error: the error of this rank in preparing the call, or None. With an error, the values are
            not read and may be missing.
        device: device of the call.

    Raises:
        ValueError: the shared values differ, or another rank has an error.
        Exception: error, if it is not None.
    """
    message = [int(error is not None), *shared.values(), *own.values()]
    rows = gather_on_mesh(groups, message + [0] * (SIZE - len(message)), device)
    if error is not None:
        raise error
    failed = [str(rank) for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise ValueError(
            f"the arguments of rank {', '.join(failed)} are invalid; see the error raised there"
        )
    for column, name in enumerate(shared, 1):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            raise ValueError(
                f"{name} must be the same on all {len(rows)} ranks, got {_listed(name, values)}"
            )
    first = 1 + len(shared)
    return [dict(zip(own, row[first:], strict=False)) for row in rows]


def _listed(name: str, values: list[int]) -> str:
    if name == "dtype":
        return ", ".join(str(FLOATS[value]) for value in values)
    hashed = name in ("attn_mask", "cache_lengths") or name.startswith(("positions", "scale"))
    return "different values" if hashed else ", ".join(map(str, values))
