"""Drop-in Transformer modules with the names, constructors and state_dict keys of torch.nn."""

from fused_attn.nn.attention import MultiheadAttention
from fused_attn.nn.caches import DecoderCache, KeyValueCache
from fused_attn.nn.generation import Generated, generate
from fused_attn.nn.norm import LayerNorm, RMSNorm
from fused_attn.nn.positional import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from fused_attn.nn.transformer import Transformer, TransformerDecoder, TransformerEncoder
from fused_attn.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "DecoderCache",
    "Generated",
    "KeyValueCache",
    "LayerNorm",
    "LearnedPositionalEmbedding",
    "MultiheadAttention",
    "RMSNorm",
    "SinusoidalPositionalEmbedding",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "generate",
]
