"""Positional embeddings, added to the token embeddings before the first layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class _PositionalEmbedding(Module):
    """Base class that adds row i of a (max_seqlen, embed_dim) table to position i of the input."""

    weight: Tensor

    def forward(self, input: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add positional embeddings to input.

        Args:
            input: (N, L, embed_dim).
            positions: (N, L) integers. Required for left padding, packed documents and decoding.
                None means 0, 1, ..., L - 1.

        Returns:
            The sum, with the shape and dtype of input.
        """
        rows = self.weight[: input.shape[1]] if positions is None else self.weight[positions]
        return input + rows.to(input.dtype)


class SinusoidalPositionalEmbedding(_PositionalEmbedding):
    """Fixed sinusoidal positional embeddings with geometrically spaced wavelengths.

    In row i of the table, column 2c is sin(i / 10000^(2c / embed_dim)) and column 2c + 1 is the
    cosine. The module has no parameters, and its table is not part of the state_dict.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """

    def __init__(self, embed_dim: int, max_seqlen: int = 5000) -> None:
        super().__init__()
        # Computed in float64: float32 angles have errors of 1e-4 after a few thousand positions.
        columns = torch.arange(0, embed_dim, 2, dtype=torch.float64)
        frequencies = torch.exp(columns * (-math.log(10000.0) / embed_dim))
        angles = torch.arange(max_seqlen, dtype=torch.float64)[:, None] * frequencies
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("weight", table.to(torch.get_default_dtype()), persistent=False)


class LearnedPositionalEmbedding(_PositionalEmbedding):
    """Learned positional embeddings with one vector per position, as in BERT and GPT-2.

    Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1;
        standard deviation of the initialization: Devlin et al. 2019, "BERT".
    """

    def __init__(self, embed_dim: int, max_seqlen: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(max_seqlen, embed_dim))
        torch.nn.init.normal_(self.weight, std=0.02)
