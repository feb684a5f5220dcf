"""Attention on several processes, with torch.distributed: any mask, with the results of one."""

from fused_attn.distributed.attention import all_to_all_attention, ring_attention
from fused_attn.distributed.context import (
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from fused_attn.distributed.decode import decode_attention
from fused_attn.distributed.sharding import Sharding

__all__ = [
    "ContextParallel",
    "Sharding",
    "all_to_all_attention",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "decode_attention",
    "ring_attention",
]
