"""The dropout mask of the contract, in kernels; fused_attn/core/philox.py has the same in torch."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
import struct

import triton
import triton.language as tl

from fused_attn.core.philox import UNIFORM_BITS


def dropout_threshold(dropout_p: float) -> int:
    """A word is kept where its upper 24 bits are at least this."""
    (rounded,) = struct.unpack("f", struct.pack("f", dropout_p))
    return math.ceil(rounded * 2.0**UNIFORM_BITS)


@triton.jit
def keep_tile(seed, row, quad, head, stream, threshold):
    """True for the elements that dropout keeps.

    Args:
        seed: int64 scalar.
        row: (M, 1) int32.
        quad: (1, N) int32, column // 4 of each group of four columns.
        head, stream: the counter's third and fourth word; scalars, or (M, 1).

    Returns:
        (M, 4 * N) bool.
    """
    zero = row * 0 + quad * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + quad, zero + row, zero + head, zero + stream)
    pairs = tl.join(
        tl.join(_keep(w0, threshold), _keep(w2, threshold)),
        tl.join(_keep(w1, threshold), _keep(w3, threshold)),
    )
    return tl.reshape(pairs, (zero.shape[0], 4 * zero.shape[1])) != 0


@triton.jit
def _keep(word, threshold):
    return ((word >> 8).to(tl.int32) >= threshold).to(tl.int8)
