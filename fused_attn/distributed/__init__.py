"""Attention and models distributed over processes, with the results of a single process.

Sequences are distributed by attention.py (ring and all-to-all attention), context.py (models) and
decode.py (caches); heads and features by tensor_parallel.py.
"""

from fused_attn.distributed.attention import all_to_all_attention, ring_attention
from fused_attn.distributed.balance import balanced as balanced_sharding
from fused_attn.distributed.context import (
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from fused_attn.distributed.decode import decode_attention
from fused_attn.distributed.sharding import Sharding
from fused_attn.distributed.tensor_parallel import (
    HeadwiseParallel,
    parallelize_plan,
    shard_placement,
)

__all__ = [
    "ContextParallel",
    "HeadwiseParallel",
    "Sharding",
    "all_to_all_attention",
    "balanced_sharding",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "decode_attention",
    "parallelize_plan",
    "ring_attention",
    "shard_placement",
]
