"""Global offsets of shards, for dropout masks that do not depend on the sharding.

The dropout mask is a function of positions (base/philox.py), which start at 0 in each call. A shard
is a call on some of the queries, keys, heads or sequences of a global call. Its offsets are added
to its positions, so it drops the same elements as the global call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_offsets(
    batch: int,
    *,
    row0: int = 0,
    key0: int = 0,
    head0: int,
    num_heads_global: int,
    batch0: int = 0,
    device: torch.device | str,
) -> Tensor:
    """Return the `dropout_offsets` of a shard of an attention call.

    Args:
        batch: number of sequences in the shard, padded or packed.
        row0: global position of the first query.
        key0: global position of the first key. Must be a multiple of 8, because 8 adjacent keys
            share a Philox counter.
        head0: global index of the first head.
        num_heads_global: number of heads of the global call.
        batch0: global index of the first sequence.
        device: device of the shard's query.

    Returns:
        int64 (batch, 3): row0, key0, and the head word of the Philox counter for the first head,
        which is the sequence's global index * num_heads_global + head0. Counters use the lower 32
        bits of these values.

    Example:
        >>> attention_offsets(2, row0=64, head0=4, num_heads_global=8, device="cpu").tolist()
        [[64, 0, 4], [64, 0, 12]]
    """
    # Fill on the device: a copy from the host would synchronize and fail in a CUDA graph.
    heads = torch.arange(batch0, batch0 + batch, device=device) * num_heads_global + head0
    return torch.stack([torch.full_like(heads, row0), torch.full_like(heads, key0), heads], dim=1)
