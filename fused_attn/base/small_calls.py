"""Size limits below which torch's kernels compute calls, because the overhead of ours dominates.

The overhead of our calls is 6 us. In training it is 30 to 45 us more than torch's, as a call is an
autograd Function in Python. All ratios are torch's time over ours, for float32 and bfloat16 on
Intel with AMX, with one and two threads (benchmarks/calls.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits in elements or multiply-adds; a call above its limit runs on our kernels.

    Attributes:
        norm_forward: elements of a layer norm without dropout: 0.6 to 1.1 for 2^14, 0.9 to 1.5 for
            2^16. With a residual the limit is half: 0.7 to 1.0 for 2^13. torch's RMS norm is
            several operations, and slower at every size.
        norm_training: with gradients: 0.5 to 0.85 for 2^16, 0.7 to 1.1 for 2^17, 0.8 to 1.5 for
            2^18.
        activation_forward: elements of an activation after a linear layer, without dropout: 0.66
            to 1.2 below 2^15, 0.9 to 1.2 above.
        activation_training: with gradients: 0.56 to 0.97 below 2^18, 0.9 to 1.5 above.
        attention_forward: multiply-adds of query @ key^T under `enable()`, without a mask or
            dropout, in float32. One query and one key take 9 us through torch's dispatcher and back
            to torch's kernel, 13 us with our kernel, 4 us without `enable()`.
        attention_training: with gradients, also with a bool mask if torch has the same result. Our
            kernels: 0.64 for 3 x 4 x 12 x 16, 0.79 for 2 x 4 x 64 x 32 (2^20). torch's kernels,
            including dispatch and the check of mask values: 0.82 and 0.85.
        compiled_forward: multiply-adds of query @ key^T in a torch.compile graph on the CPU, for
            `compile_pass()`. Inductor's code over ours: 0.72 for 2^17, 0.85 for 2^20, 1.08 for
            2.5 * 2^20, 1.35 for 2^26.
        compiled_training: with gradients: 0.7 for 2^17, 0.82 for 2^20, 0.97 for 2.5 * 2^20, 1.0 for
            2^22, 1.2 for 2^26.
        packing_forward: padding tokens times the squared width of a stack of encoder layers. Two
            layers, padded over packed time: 0.8 for 2^17, 0.92 for 2^19, 1.0 for 2^20 to 2^22.
        packing_training: with gradients: 0.9 for 2^17, 1.04 for 2^19, 1.14 for 2^21.
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


# Used by tests: every call runs on our kernels.
NONE = Limits(*[-1] * len(Limits._fields))
limits = Limits(
    1 << 14, 1 << 17, 1 << 15, 1 << 18, 1 << 12, 1 << 20, 1 << 21, 1 << 22, 1 << 20, 1 << 18
)
