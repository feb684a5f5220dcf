"""The sizes up to which calls are left to torch's own kernels, which finish before ours are called.

A call of ours takes 6 us, and 30 to 45 us longer than torch's in training, where it is a Function
in Python. All figures are torch's time over ours, float32 and bfloat16, Intel with AMX, on one and
two threads (benchmarks/calls.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Numbers of elements or multiply-adds; a call of more of them runs on our kernels.

    Attributes:
        norm_forward: elements of a layer norm without dropout: 0.6 to 1.1 for 2^14, 0.9 to 1.5 for
            2^16; with a residual half of it, 0.7 to 1.0 for 2^13. torch's RMS norm is several
            operations, and slower from the smallest size on.
        norm_training: the same with gradients: 0.5 to 0.85 for 2^16, 0.7 to 1.1 for 2^17, 0.8 to
            1.5 for 2^18.
        activation_forward: elements of an activation behind a linear layer, without dropout: 0.66
            to 1.2 below 2^15, 0.9 to 1.2 from there on.
        activation_training: the same with gradients: 0.56 to 0.97 below 2^18, 0.9 to 1.5 from there
            on.
        attention_forward: multiply-adds of query @ key^T under `enable()`, without a mask or
            dropout, in float32. One query and key take 9 us by way of torch's dispatcher and back,
            13 with our kernel, 4 without `enable()`.
        attention_training: the same with gradients, also with a bool mask where torch has the same
            result: our kernels 0.64 for 3 x 4 x 12 x 16 and 0.79 for 2 x 4 x 64 x 32 (2^20), those
            of torch by way of its dispatcher and a look at the values 0.82 and 0.85.
        compiled_forward: multiply-adds of query @ key^T in a graph of torch.compile on the CPU, for
            `compile_pass()`; against the code that Inductor makes: 0.72 for 2^17, 0.85 for 2^20,
            1.08 for 2.5 * 2^20, 1.35 for 2^26.
        compiled_training: the same with gradients: 0.7 for 2^17, 0.82 for 2^20, 0.97 for
            2.5 * 2^20, 1.0 for 2^22, 1.2 for 2^26.
        packing_forward: padding tokens times the square of the width of a stack of encoder layers.
            Two layers, padded over packed time: 0.8 for 2^17, 0.92 for 2^19, 1.0 for 2^20 to 2^22.
        packing_training: the same with gradients: 0.9 for 2^17, 1.04 for 2^19, 1.14 for 2^21.
    """

    norm_forward: int
    norm_training: int
    activation_forward: int
    activation_training: int
    attention_forward: int
    attention_training: int
    compiled_forward: int
    compiled_training: int
    packing_forward: int
    packing_training: int


# Tests use these limits: every call runs on our kernels.
NONE = Limits(*[-1] * len(Limits._fields))
limits = Limits(
    1 << 14, 1 << 17, 1 << 15, 1 << 18, 1 << 12, 1 << 20, 1 << 21, 1 << 22, 1 << 20, 1 << 18
)
