"""Philox4x32-10 in torch operations: the dropout masks of the kernels, for the reference.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". csrc/philox.h is the
same generator in C++; tests hold the two together bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
ROUNDS = 10
UNIFORM_BITS = 24  # what a float32 in [0, 1) holds exactly


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> list[Tensor]:
    """Four words of 32 bits (as int64) for each counter.

    Args:
        counter: four int64 tensors below 2**32, broadcast against each other.
        seed: int64 scalar; its low and high halves are the key.
    """
    words = list(torch.broadcast_tensors(*counter))
    key = [seed & _MASK32, (seed >> 32) & _MASK32]
    for _ in range(ROUNDS):
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(k + step) & _MASK32 for k, step in zip(key, _KEY_STEPS, strict=True)]
    return words


def attention_keep(
    seed: Tensor,
    dropout_p: float,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: slice = slice(None),
) -> Tensor:
    """Bool (batch, num_heads, seqlen_q, seqlen_k): the probabilities that dropout keeps; of these
    heads alone.

    Counter (j / 4, i, batch * num_heads + head, 0), word j % 4.
    """
    row = torch.arange(seqlen_q, device=seed.device)[:, None]
    head = torch.arange(batch * num_heads, device=seed.device).reshape(batch, num_heads)[:, heads]
    keep = _keep(seed, dropout_p, seqlen_k, row, head.reshape(-1, 1, 1), 0)
    return keep.reshape(*head.shape, seqlen_q, seqlen_k)


def norm_keep(seed: Tensor, dropout_p: float, rows: int, columns: int) -> Tensor:
    """Bool (rows, columns): the elements that dropout keeps. Counter (column / 4, row, 0, 1)."""
    row = torch.arange(rows, device=seed.device)[:, None]
    return _keep(seed, dropout_p, columns, row, torch.zeros_like(row), 1)


def dropout_scale(dropout_p: float) -> float:
    """The factor of values that dropout leaves."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def new_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of the device; it stays there (no synchronisation)."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=device)


def _keep(
    seed: Tensor, dropout_p: float, columns: int, row: Tensor, head: Tensor, stream: int
) -> Tensor:
    # One quad more than are needed, and no slice: torch.export keeps columns open where nothing
    # asks whether there is one quad, or whether the quads have more columns.
    quad = torch.arange((columns + 7) // 4, device=seed.device)
    words = philox4x32((quad, row, head, torch.full_like(quad, stream)), seed)
    used = torch.arange(columns, device=seed.device)
    word = torch.stack(words, dim=-1).flatten(-2).index_select(-1, used)
    uniform = (word >> (32 - UNIFORM_BITS)).to(torch.float32) * 2.0**-UNIFORM_BITS
    return uniform >= torch.tensor(dropout_p, dtype=torch.float32, device=seed.device)


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, both below 2**32; int64 would overflow on the product."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
