"""Size limits below which calls run on torch's kernels, because our overhead would dominate.

Our calls have an overhead of 6 us. In training, it exceeds torch's by 30 to 45 us, because a call
is an autograd.Function in Python.

Unless stated otherwise, the ratios below are torch's time divided by ours, so ours is faster above
1. They were measured with benchmarks/calls.py on an Intel CPU with AMX, in float32 and bfloat16,
with one and two threads.
"""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Size limits of calls, in the units below; larger calls run on our kernels or are packed.

    Attributes:
        norm_forward: elements of a layer norm without dropout. The ratio is 0.6 to 1.1 for 2^14
            elements and 0.9 to 1.5 for 2^16. With a residual the limit is halved, as the ratio is
            0.7 to 1.0 for 2^13. RMS norms have no limit, because torch's RMS norm consists of
            several operations and is slower at every size.
        norm_training: as norm_forward, for calls with gradients. The ratio is 0.5 to 0.85 for 2^16
            elements, 0.7 to 1.1 for 2^17 and 0.8 to 1.5 for 2^18.
        activation_forward: elements of an activation after a linear layer, without dropout. The
            ratio is 0.66 to 1.2 below 2^15 elements and 0.9 to 1.2 above.
        activation_training: as activation_forward, for calls with gradients. The ratio is 0.56 to
            0.97 below 2^18 elements and 0.9 to 1.5 above.
        compiled_forward: multiply-adds of query @ key^T in a torch.compile graph on the CPU, for
            `compile_pass()`. The ratio of the time of Inductor's code to ours is 0.72 for 2^17,
            0.85 for 2^20, 1.08 for 2.5 * 2^20 and 1.35 for 2^26.
        compiled_training: as compiled_forward, for calls with gradients. The ratio is 0.7 for 2^17,
            0.82 for 2^20, 0.97 for 2.5 * 2^20, 1.0 for 2^22 and 1.2 for 2^26.
        packing_forward: padding tokens times the squared width of a stack of encoder layers, above
            which the stack is packed. For two layers, the ratio of padded to packed time is 0.8 for
            2^17, 0.92 for 2^19 and 1.0 for 2^20 to 2^22.
        packing_training: as packing_forward, for calls with gradients. The ratio is 0.9 for 2^17,
            1.04 for 2^19 and 1.14 for 2^21.
    """

    norm_forward: int
    norm_training: int
    activation_forward: int
    activation_training: int
    compiled_forward: int
    compiled_training: int
    packing_forward: int
    packing_training: int


# Tests use these limits to run every call on our kernels.
NONE = Limits(*[-1] * len(Limits._fields))
limits = Limits(1 << 14, 1 << 17, 1 << 15, 1 << 18, 1 << 21, 1 << 22, 1 << 20, 1 << 18)
