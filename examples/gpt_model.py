"""Model of gpt.py: a decoder like GPT-2 with later improvements, and its text generation.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2). Changes
of later models are RMS norms (Zhang and Sennrich 2019), rotary positions (Su et al. 2021,
"RoFormer"), SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"), grouped queries (Ainslie et
al. 2023, "GQA"), and sliding windows in every other layer (Gemma Team 2024, "Gemma 2").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_attn
from fused_attn import masks
from fused_attn.nn import KeyValueCache, RMSNorm

D_MODEL, NUM_LAYERS, FEED_FORWARD = 128, 4, 256
NUM_HEADS, NUM_HEADS_KV, HEAD_DIM = 8, 2, 16
EPS = torch.finfo(torch.float32).eps  # eps of RMS norms; the default would depend on the dtype
WINDOW = 64  # number of visible positions in a windowed layer, including the query's position


def rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles of positions (..., seqlen): (..., seqlen, HEAD_DIM / 2).

    An angle is proportional to the position, with another frequency for each pair of features. The
    dot product of a query at position i and a key at j then depends on positions only by i - j.

    Source: Su et al. 2021, section 3.2.2. The frequencies are those of Vaswani et al. 2017.
    """
    angles = positions[..., None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return angles.cos(), angles.sin()


class WindowCache(KeyValueCache):
    """KV cache of the WINDOW - 1 latest positions, which suffice for text of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return those of the cached and of the new positions."""
        self.length += key.shape[2]
        if self.kept is not None:
            key, value = torch.cat([self.kept[0], key], 2), torch.cat([self.kept[1], value], 2)
        self.kept = key[:, :, 1 - WINDOW :], value[:, :, 1 - WINDOW :]
        return key, value


class Attention(nn.Module):
    """Self-attention in which NUM_HEADS / NUM_HEADS_KV query heads share one key/value head.

    Source: Ainslie et al. 2023, section 2.2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(D_MODEL, NUM_HEADS * HEAD_DIM, bias=False)
        self.key_value = nn.Linear(D_MODEL, 2 * NUM_HEADS_KV * HEAD_DIM, bias=False)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, D_MODEL, bias=False)

    def forward(
        self,
        x: Tensor,
        by: tuple[Tensor, Tensor],
        mask: masks.Mask | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Return self-attention of x (batch, seqlen, D_MODEL), extended to cached positions."""
        query = self.query(x).unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        pair = self.key_value(x).unflatten(-1, (2, NUM_HEADS_KV, HEAD_DIM))
        key, value = pair.permute(2, 0, 3, 1, 4)  # (batch, NUM_HEADS_KV, seqlen, HEAD_DIM) each
        query, key = (fused_attn.rotary_embedding(x, *by, interleaved=True) for x in (query, key))
        if cache is not None:  # keys are cached after rotation, because positions do not change
            key, value = cache.append(key, value)
        out = fused_attn.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer. Source: Shazeer 2020, section 2."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D_MODEL, FEED_FORWARD, bias=False)
        self.up = nn.Linear(D_MODEL, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Decoder layer: attention and feed-forward, each after a fused residual addition and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(D_MODEL, eps=EPS), RMSNorm(D_MODEL, eps=EPS)
        self.attention, self.feed_forward = Attention(), SwiGLU()

    def forward(self, x: Tensor, residual: Tensor | None, *context: Any) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the residual; the next norm adds them in one kernel."""
        normed, residual = self.norm1(x, residual=residual, return_residual=True)
        attended = self.attention(normed, *context)
        normed, residual = self.norm2(attended, residual=residual, return_residual=True)
        return self.feed_forward(normed), residual


class GPT(nn.Module):
    """Language model with sliding windows in even layers and full causal attention in odd ones."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, D_MODEL)
        nn.init.normal_(self.embedding.weight, std=0.05)  # small compared with layer outputs
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = RMSNorm(D_MODEL, eps=EPS)
        self.head = nn.Linear(D_MODEL, vocabulary, bias=False)
        # Layers share masks, because masks cache data that kernels derive from them. The last query
        # is aligned with the last key, so that the masks are also correct with a KV cache.
        windowed = masks.sliding_window(WINDOW - 1, align="bottom_right")
        self.masks = [windowed, masks.causal(align="bottom_right")]

    def caches(self) -> list[KeyValueCache]:
        """Return one empty KV cache per layer."""
        return [KeyValueCache() if i % 2 else WindowCache() for i in range(NUM_LAYERS)]

    def forward(
        self,
        tokens: Tensor,
        caches: Sequence[KeyValueCache] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return logits (batch, seqlen, vocabulary) of the token after each position.

        Args:
            tokens: (batch, seqlen) int64. With caches, these are the tokens after the cached ones.
            caches: result of `caches()`, to which the tokens' keys and values are appended.
            positions: (batch, seqlen) int64, the position of each token in its document. By
                default, the positions continue those in the caches.
        """
        seqlen = tokens.shape[1]
        if positions is None:
            positions = torch.arange(seqlen) + (caches[0].length if caches else 0)
        by = rotation(positions)
        x, residual = self.embedding(tokens), None
        for i, block in enumerate(self.blocks):
            # A single query attends to all cached keys, so no mask is needed.
            mask = self.masks[i % 2] if seqlen > 1 else None
            x, residual = block(x, residual, by, mask, caches[i] if caches else None)
        return self.head(self.norm(x, residual=residual))


@torch.inference_mode()
def generate(
    model: GPT,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    cached: bool = True,
) -> Tensor:
    """Return the tokens (batch, seqlen), extended by `count` generated tokens.

    Args:
        temperature: divisor of the logits before sampling. 0 selects the most likely token.
        seed: seed of the sampling.
        cached: use a KV cache, so that each step computes only the new token.
    """
    generator = torch.Generator().manual_seed(seed)
    caches = model.caches() if cached else None
    new = tokens
    for _ in range(count):
        logits = model(new if cached else tokens, caches)[:, -1]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens
