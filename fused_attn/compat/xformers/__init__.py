"""xFormers' memory-efficient attention on the kernels of this package, including those for CPUs.

`fused_attn.compat.xformers.ops` has the names, arguments and layouts of `xformers.ops`, as far as
they concern attention. See there.
"""

from fused_attn.compat.xformers import ops

__all__ = ["ops"]
