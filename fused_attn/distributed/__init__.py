"""Attention on several processes, with torch.distributed: any mask, with the results of one."""

from fused_attn.distributed.attention import all_to_all_attention, ring_attention
from fused_attn.distributed.sharding import Sharding

__all__ = ["Sharding", "all_to_all_attention", "ring_attention"]
