"""Attention masks: the public `Mask` type, and its conversion for kernels and the reference.

The meaning of masks is defined in this package:

    mask.py             `Mask`, the functions that create one, and the operators `&` and `|`
    tensors.py          masks from tensors and from torch's mask objects
    mask_mod.py         masks from functions of positions, and unions of masks
    tables.py           masks as intervals of keys or bits, for CPUs
    intervals.py        masks as one interval of keys per query, and lists of visible blocks
    spec.py             `MaskSpec`, the form for kernels, and `spec_of_mask`, which creates it
    fields.py           dimensions of the tensors of a MaskSpec
    band.py             causal masks and windows that are the same for all sequences
    restrict.py         masks of some queries, keys or heads
    materialize.py      dense tensors for the reference
    memo.py             cache of values derived from tensors
    picture.py          plots of masks
    recognize.py        detection of torch.nn's causal mask
    torch_arguments.py  arguments for torch's scaled_dot_product_attention
"""

from fused_attn.masks import picture as _picture  # noqa: F401 - Mask.plot
from fused_attn.masks.mask import (
    ALIGNMENTS,
    UNLIMITED,
    Mask,
    alibi,
    causal,
    documents,
    padding,
    prefix_lm,
    sliding_window,
)
from fused_attn.masks.mask_mod import from_mask_mod
from fused_attn.masks.tensors import as_mask, bias, dense

__all__ = [
    "ALIGNMENTS",
    "UNLIMITED",
    "Mask",
    "alibi",
    "as_mask",
    "bias",
    "causal",
    "dense",
    "documents",
    "from_mask_mod",
    "padding",
    "prefix_lm",
    "sliding_window",
]
