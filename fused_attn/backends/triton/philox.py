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
