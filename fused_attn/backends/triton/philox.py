"""Philox dropout masks in kernels, identical to the torch version in fused_attn/base/philox.py."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from fused_attn.base import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)


@triton.jit
def keep_tile(seed, row, octet, head, stream, threshold):
    """Return a mask that is True for the elements that dropout keeps.

    The Philox counter is (octet, row, head, stream). Each counter yields eight 16-bit values.

    Args:
        seed: int64 scalar.
        row: (M, 1) int32.
        octet: (1, N) int32; column // 8 for each group of eight columns.
        head, stream: scalars, or (M, 1).
        threshold: elements are dropped if their 16-bit value is below it.

    Returns:
        (M, 8 * N) bool.
    """
    zero = row * 0 + octet * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + octet, zero + row, zero + head, zero + stream, _ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join((words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32))
    return tl.reshape(halves >= threshold, (zero.shape[0], 8 * zero.shape[1]))


@triton.jit
def keep_words(seed, row, octet, head, stream, threshold):
    """Return the bits of `keep_tile`, for at most 64 columns.

    Returns:
        (M,) int64. Bit k is column k.
    """
    zero = row * 0 + octet * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + octet, zero + row, zero + head, zero + stream, _ROUNDS)
    byte = (
        (_keeps_half(w0, 0, threshold) << 0)
        | (_keeps_half(w0, 1, threshold) << 1)
        | (_keeps_half(w1, 0, threshold) << 2)
        | (_keeps_half(w1, 1, threshold) << 3)
        | (_keeps_half(w2, 0, threshold) << 4)
        | (_keeps_half(w2, 1, threshold) << 5)
        | (_keeps_half(w3, 0, threshold) << 6)
        | (_keeps_half(w3, 1, threshold) << 7)
    )
    place = 8 * tl.arange(0, octet.shape[1]).to(tl.int64)[None, :]
    return tl.sum(byte.to(tl.int64) << place, 1)


@triton.jit
def _keeps_half(word, HALF: tl.constexpr, threshold):
    half = (word >> 16) if HALF else (word & 0xFFFF)
    return (half.to(tl.int32) >= threshold).to(tl.int32)
