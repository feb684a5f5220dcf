"""The model of gpt.py: a decoder with what followed on GPT-2, and the text that it generates.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), with
what later models changed: RMS norms (Zhang and Sennrich 2019), rotary positions (Su et al. 2021,
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
EPS = torch.finfo(torch.float32).eps  # of RMS norms; their default depends on the type
WINDOW = 64  # positions that a windowed layer sees, its own among them


def rotation(start: int, seqlen: int) -> Tensor:
    """A complex number of length 1 for each position and pair of features: (seqlen, HEAD_DIM / 2).

    Their angles grow with the position; how fast differs from pair to pair.

    Source: Su et al. 2021, section 3.2.2; the frequencies are those of Vaswani et al. 2017.
    """
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(start, start + seqlen)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Each pair of features as a complex number, times `by`: (batch, heads, seqlen, HEAD_DIM).

    The product of a query and a key that are turned by i and j angles depends on i - j alone.
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by).flatten(-2)


class WindowCache(KeyValueCache):
    """Keeps no more than later queries will see: WINDOW - 1 positions, however long the text."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the kept positions and of the new ones."""
        self.length += key.shape[2]
        if self.kept is not None:
            key, value = torch.cat([self.kept[0], key], 2), torch.cat([self.kept[1], value], 2)
        self.kept = key[:, :, 1 - WINDOW :], value[:, :, 1 - WINDOW :]
        return key, value


class Attention(nn.Module):
    """Self-attention in which NUM_HEADS / NUM_HEADS_KV heads of queries share one of keys.

    Source: Ainslie et al. 2023, section 2.2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(D_MODEL, NUM_HEADS * HEAD_DIM, bias=False)
        self.key_value = nn.Linear(D_MODEL, 2 * NUM_HEADS_KV * HEAD_DIM, bias=False)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, D_MODEL, bias=False)

    def forward(
        self, x: Tensor, by: Tensor, mask: masks.Mask | None, cache: KeyValueCache | None
    ) -> Tensor:
        """x (batch, seqlen, D_MODEL) attends to itself, and to what the cache has from before."""
        query = self.query(x).unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        pair = self.key_value(x).unflatten(-1, (2, NUM_HEADS_KV, HEAD_DIM))
        key, value = pair.permute(2, 0, 3, 1, 4)  # (batch, NUM_HEADS_KV, seqlen, HEAD_DIM) each
        query, key = rotate(query, by), rotate(key, by)
        if cache is not None:  # keys are kept turned: their positions do not change
            key, value = cache.append(key, value)
        out = fused_attn.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A feed-forward layer with a gate. Source: Shazeer 2020, section 2."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D_MODEL, FEED_FORWARD, bias=False)
        self.up = nn.Linear(D_MODEL, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm, which also adds up what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(D_MODEL, eps=EPS), RMSNorm(D_MODEL, eps=EPS)
        self.attention, self.feed_forward = Attention(), SwiGLU()

    def forward(self, x: Tensor, residual: Tensor | None, *context: Any) -> tuple[Tensor, Tensor]:
        """What is added next, and the sum so far: one kernel adds and normalises."""
        normed, residual = self.norm1(x, residual=residual, return_residual=True)
        attended = self.attention(normed, *context)
        normed, residual = self.norm2(attended, residual=residual, return_residual=True)
        return self.feed_forward(normed), residual


class GPT(nn.Module):
    """Predicts the next token at every position; even layers see a window, odd ones all before."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, D_MODEL)
        nn.init.normal_(self.embedding.weight, std=0.05)  # small beside what layers add to it
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = RMSNorm(D_MODEL, eps=EPS)
        self.head = nn.Linear(D_MODEL, vocabulary, bias=False)
        # Layers share their masks, which keep what kernels derive from them. The last query stands
        # with the last key, so that they hold with a cache too.
        windowed = masks.sliding_window(WINDOW - 1, align="bottom_right")
        self.masks = [windowed, masks.causal(align="bottom_right")]

    def caches(self) -> list[KeyValueCache]:
        """An empty cache for each layer."""
        return [KeyValueCache() if i % 2 else WindowCache() for i in range(NUM_LAYERS)]

    def forward(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Logits (batch, seqlen, vocabulary) behind each token.

        Args:
            tokens: (batch, seqlen); with caches those that follow on what went into them.
            caches: of `caches()`; the tokens' keys and values are appended.
        """
        seqlen = tokens.shape[1]
        by = rotation(caches[0].length if caches else 0, seqlen)
        x, residual = self.embedding(tokens), None
        for i, block in enumerate(self.blocks):
            # A single query sees all that is there.
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
    """The tokens (batch, seqlen) and `count` more.

    Args:
        temperature: divides the logits of which each token is drawn; 0 takes the likeliest.
        seed: of the draws.
        cached: each step computes the new token only, instead of the whole text again.
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
