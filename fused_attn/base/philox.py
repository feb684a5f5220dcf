"""Philox4x32-7 in torch operations: the dropout masks of the kernels, for the reference.

Each counter yields eight 16-bit values for adjacent elements, so dropout_p is a multiple of 2^-16.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", who find that 7 rounds
pass all of TestU01's BigCrush. csrc/philox.h is the same generator in C++; tests check that both
agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
ROUNDS = 7
DECISIONS = 8  # per counter: the lower and the upper half of each word
STEPS = 1 << 16


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> list[Tensor]:
    """Compute four 32-bit words (as int64) for each counter.

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
    *,
    heads: slice = slice(None),
    offsets: Tensor | None = None,
) -> Tensor:
    """Return the attention weights that dropout keeps, for the selected heads.

    The counter is (j / 8, i, batch * num_heads + head, 0), and j % 8 selects one of its values.
    With offsets (row0, key0, head0) for each sequence (see shards.py), the counter is
    (key0 / 8 + j / 8, row0 + i, head0 + head, 0).

    Returns:
        bool (batch, num_heads, seqlen_q, seqlen_k), with only these heads.
    """
    device = seed.device
    row = torch.arange(seqlen_q, device=device)[:, None]
    octet: Tensor | int = 0
    if offsets is None:
        head = torch.arange(batch * num_heads, device=device).reshape(batch, num_heads)
    else:
        row0, key0, head0 = (offsets[:, i, None] for i in range(3))
        row = (row0[..., None, None] + row).expand(-1, num_heads, -1, -1)[:, heads].flatten(0, 1)
        octet = (key0 // DECISIONS).expand(-1, num_heads)[:, heads].reshape(-1, 1, 1)
        head = head0 + torch.arange(num_heads, device=device)
    head = head[:, heads]
    keep = _keep(seed, dropout_p, seqlen_k, row, head.reshape(-1, 1, 1), 0, octet)
    return keep.reshape(*head.shape, seqlen_q, seqlen_k)


def norm_keep(
    seed: Tensor, dropout_p: float, rows: int, columns: int, *, offsets: Tensor | None = None
) -> Tensor:
    """Return the elements of a norm's input that dropout keeps, as bool (rows, columns).

    The counter is (column / 8, row, 0, 1). With offsets (see shards.py) for runs of `length` rows,
    row r uses offsets[r // length] + r % length instead.
    """
    row = torch.arange(rows, device=seed.device)[:, None]
    if offsets is not None:
        of_run = torch.arange(rows // max(offsets.shape[0], 1), device=seed.device)
        row = (offsets[:, None] + of_run).reshape(rows, 1)
    return _keep(seed, dropout_p, columns, row, torch.zeros_like(row), 1)


def dropout_threshold(dropout_p: float) -> int:
    """Return dropout_p * 2^16, rounded half to even; 16-bit values below it are dropped."""
    return round(dropout_p * STEPS)


def dropout_scale(dropout_p: float) -> float:
    """Return the scale of elements that dropout keeps; 0 if all are dropped."""
    kept = STEPS - dropout_threshold(dropout_p)
    return STEPS / kept if kept else 0.0


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed from the device's torch generator, on the device (no synchronisation)."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=device)


def _keep(
    seed: Tensor,
    dropout_p: float,
    columns: int,
    row: Tensor,
    head: Tensor,
    stream: int,
    octet0: Tensor | int = 0,
) -> Tensor:
    # One octet more than needed, and no slice: torch.export keeps columns dynamic only if nothing
    # tests whether there is one octet, or whether the octets cover more than the columns.
    octet = torch.arange((columns + 2 * DECISIONS - 1) // DECISIONS, device=seed.device)
    stream_word = torch.full_like(octet, stream)
    octet, row, head = (octet0 + octet) & _MASK32, row & _MASK32, head & _MASK32
    words = philox4x32((octet, row, head, stream_word), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    used = torch.arange(columns, device=seed.device)
    half = torch.stack(halves, dim=-1).flatten(-2).index_select(-1, used)
    return half >= dropout_threshold(dropout_p)


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a * b, for factors below 2**32.

    The product itself would overflow int64.
    """
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
