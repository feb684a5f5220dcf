"""Positional embeddings, added to the token embeddings before the first layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class _PositionalEmbedding(Module):
    """Base class that adds row i of a (max_seqlen, embed_dim) table to position i of the input."""

    weight: Tensor

    def __init__(self, embed_dim: int, max_seqlen: int, batch_first: bool) -> None:
        super().__init__()
        for name, value in (("embed_dim", embed_dim), ("max_seqlen", max_seqlen)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.embed_dim = embed_dim
        self.max_seqlen = max_seqlen
        self.batch_first = batch_first

    def forward(self, input: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add positional embeddings to input.

        Args:
            input: (L, N, embed_dim), (N, L, embed_dim) with batch_first, or (L, embed_dim).
            positions: integer tensor with the shape of input without its last dimension; values
                must be below max_seqlen. Required for left padding, packed documents and decoding.
                None means 0, 1, ..., L - 1.

        Returns:
            The sum, with the shape and dtype of input.
        """
        if input.dim() not in (2, 3) or input.shape[-1] != self.embed_dim:
            raise ValueError(
                f"input must have shape (L, N, {self.embed_dim}), (N, L, {self.embed_dim}) with "
                f"batch_first, or (L, {self.embed_dim}), got {tuple(input.shape)}"
            )
        if positions is not None:
            if positions.shape != input.shape[:-1]:
                raise ValueError(
                    f"positions must have shape {tuple(input.shape[:-1])} (as input without its "
                    f"last dimension), got {tuple(positions.shape)}"
                )
            return input + self.weight[positions].to(input.dtype)
        batched = input.dim() == 3
        seqlen = input.shape[1] if batched and self.batch_first else input.shape[0]
        if seqlen > self.max_seqlen:
            raise ValueError(
                f"input must have at most {self.max_seqlen} positions (max_seqlen), got {seqlen}"
            )
        rows = self.weight[:seqlen].to(input.dtype)
        return input + (rows[:, None] if batched and not self.batch_first else rows)

    def extra_repr(self) -> str:
        """Return the constructor arguments for repr()."""
        return f"{self.embed_dim}, max_seqlen={self.max_seqlen}, batch_first={self.batch_first}"


class SinusoidalPositionalEmbedding(_PositionalEmbedding):
    """Fixed sinusoidal positional embeddings with geometrically spaced wavelengths.

    In row i of the table, column 2c is sin(i / 10000^(2c / embed_dim)) and column 2c + 1 is the
    cosine. The module has no parameters.

    Args:
        embed_dim: number of features of the input; must be even.
        max_seqlen: number of positions in the table. The table is not part of the state_dict, so
            max_seqlen can differ between training and inference.
        batch_first: the input has shape (N, L, embed_dim) instead of (L, N, embed_dim).
        device, dtype: device and dtype of the table.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """

    def __init__(
        self,
        embed_dim: int,
        max_seqlen: int = 5000,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, max_seqlen, batch_first)
        if embed_dim % 2:
            raise ValueError(f"embed_dim must be even, got {embed_dim}")
        table = torch.empty(max_seqlen, embed_dim, device=device, dtype=dtype)
        self.register_buffer("weight", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table; must be called after `to_empty`."""
        # Computed in float64: float32 angles have errors of 1e-4 after a few thousand positions.
        columns = torch.arange(0, self.embed_dim, 2, dtype=torch.float64)
        frequencies = torch.exp(columns * (-math.log(10000.0) / self.embed_dim))
        angles = torch.arange(self.max_seqlen, dtype=torch.float64)[:, None] * frequencies
        self.weight.copy_(torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))


class LearnedPositionalEmbedding(_PositionalEmbedding):
    """Learned positional embeddings with one vector per position, as in BERT and GPT-2.

    Args:
        embed_dim: number of features of the input.
        max_seqlen: number of positions in the table.
        batch_first: the input has shape (N, L, embed_dim) instead of (L, N, embed_dim).
        device, dtype: device and dtype of the table.

    Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1;
        standard deviation of the initialisation: Devlin et al. 2019, "BERT".
    """

    def __init__(
        self,
        embed_dim: int,
        max_seqlen: int,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, max_seqlen, batch_first)
        self.weight = Parameter(torch.empty(max_seqlen, embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise the table from a normal distribution with standard deviation 0.02."""
        torch.nn.init.normal_(self.weight, std=0.02)
