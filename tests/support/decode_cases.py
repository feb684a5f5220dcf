"""Decoding on ranks with a cache that is distributed over them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ring_cases import mesh_of
from torch import Tensor

from fused_attn import distributed


def decode_on_rank(
    tensors: dict[str, Tensor], lengths: list, sharding, steps: tuple, mask, options: dict
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return out and lse of each step, and the keys in this rank's cache after the last step.

    Args:
        tensors: query, key and value of all steps, and the filled caches.
        lengths: cached positions before the first step.
        steps: number of new positions of each step.
    """
    positions = sharding.positions(dist.get_rank())
    caches = [tensors[f"{n}_cache"].index_select(2, positions) for n in ("key", "value")]
    lengths, outs, lses, at = torch.tensor(lengths), [], [], 0
    for count in steps:
        new = slice(at, at + count)
        out, lse = distributed.decode_attention(
            tensors["query"][:, :, new], *caches, cache_lengths=lengths, positions=sharding,
            mesh=mesh_of((dist.get_world_size(),)), key=tensors["key"][:, :, new],
            value=tensors["value"][:, :, new], attn_mask=mask, return_lse=True, **options,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
        lengths, at = lengths + count, at + count
    return outs, lses, caches[0]
