"""Philox4x32-7 dropout masks in torch operations, for the reference.

Each counter yields eight 16-bit values for adjacent elements, so dropout_p is rounded to a multiple
of 2^-16. The kernels use the same generator in C++ (csrc/philox.h). Tests check that both agree bit
for bit.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". They find that 7 rounds
    pass all tests of TestU01's BigCrush.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
ROUNDS = 7
DECISIONS = 8  # 16-bit values per counter: the lower and the upper half of each of four words
STEPS = 1 << 16  # dropout_p is rounded to a multiple of 1 / STEPS


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> list[Tensor]:
    """Compute four 32-bit random words for each counter.

    Args:
        counter: the four words of the counter, as int64 tensors with values in [0, 2**32), which
            are broadcast against each other.
        seed: int64 scalar tensor; its low and high 32 bits are the two words of the key.

    Returns:
        Four int64 tensors with values in [0, 2**32), of the broadcast shape.
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
    """Return the dropout mask of attention weights, for the selected heads.

    The counter for query i, key j and head h of sequence b is (j / 8, i, b * num_heads + h, 0), and
    j % 8 selects one of its eight values. With offsets, it is (key0 / 8 + j / 8, row0 + i,
    head0 + h, 0).

    Args:
        seed: int64 scalar tensor.
        heads: selects the heads of the result.
        offsets: int64 (batch, 3), row0, key0 and head0 of each sequence (see
            distributed/sharding.py), or None.

    Returns:
        bool (batch, number of selected heads, seqlen_q, seqlen_k), True = kept.
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
    """Return the dropout mask of a norm's input: bool (rows, columns), True = kept.

    The counter is (column / 8, row, 0, 1), and column % 8 selects one of its eight values. With
    offsets (see distributed/dtensors.py), runs of n = rows / len(offsets) rows are numbered
    separately, and row r of the call becomes offsets[r // n] + r % n in the counter.
    """
    row = torch.arange(rows, device=seed.device)[:, None]
    if offsets is not None:
        of_run = torch.arange(rows // max(offsets.shape[0], 1), device=seed.device)
        row = (offsets[:, None] + of_run).reshape(rows, 1)
    return _keep(seed, dropout_p, columns, row, torch.zeros_like(row), 1)


def dropout_threshold(dropout_p: float) -> int:
    """Return dropout_p * 2^16, rounded half to even.

    An element is dropped if its 16-bit random value is below this threshold.
    """
    return round(dropout_p * STEPS)


def dropout_scale(dropout_p: float) -> float:
    """Return the factor for elements that dropout keeps: 1 / (1 - p) for the rounded dropout_p.

    If all elements are dropped, it is 0.
    """
    kept = STEPS - dropout_threshold(dropout_p)
    return STEPS / kept if kept else 0.0


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, an int64 scalar, from the device's default generator without a device sync."""
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
    # Compute a spare octet, and select columns by index_select instead of a slice. torch.export
    # would specialize `columns` if an operation compared the number of octets with 1, or the number
    # of their elements with `columns`.
    octet = torch.arange((columns + 2 * DECISIONS - 1) // DECISIONS, device=seed.device)
    stream_word = torch.full_like(octet, stream)
    octet, row, head = (octet0 + octet) & _MASK32, row & _MASK32, head & _MASK32
    words = philox4x32((octet, row, head, stream_word), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    used = torch.arange(columns, device=seed.device)
    half = torch.stack(halves, dim=-1).flatten(-2).index_select(-1, used)
    return half >= dropout_threshold(dropout_p)


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a * b, for factors in [0, 2**32).

    The 64-bit product would overflow int64, so the factor a is split into 16-bit halves.
    """
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
