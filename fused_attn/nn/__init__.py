"""Drop-in Transformer modules with the names, constructors and state_dict keys of torch.nn."""

from fused_attn.nn.attention import MultiheadAttention
from fused_attn.nn.caches import DecoderCache, KeyValueCache
from fused_attn.nn.norm import LayerNorm, RMSNorm
from fused_attn.nn.transformer import Transformer, TransformerDecoder, TransformerEncoder
from fused_attn.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "DecoderCache",
    "KeyValueCache",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
