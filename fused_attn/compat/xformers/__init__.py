"""xFormers' memory-efficient attention on the kernels of this package, including those for CPUs.

`fused_attn.compat.xformers.ops` has the attention functions of `xformers.ops`, with the same names,
arguments and layouts.
"""

from fused_attn.compat.xformers import ops

__all__ = ["ops"]
