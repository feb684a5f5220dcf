"""Attention masks: the public `Mask` type, and its conversion for kernels and the reference.

All code that interprets masks is in this package:

    mask.py             `Mask`, the functions that create one, and the operator `&`
    spec.py             `MaskSpec`, the form for kernels, and `normalize`, which creates it
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
    as_mask,
    bias,
    causal,
    dense,
    documents,
    padding,
    prefix_lm,
    sliding_window,
)

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
    "padding",
    "prefix_lm",
    "sliding_window",
]
