"""Attention masks: what users compose, what kernels see of it, and what the reference sees.

A mask is interpreted in this folder and nowhere else.

    mask.py          `Mask`, the functions that make one, and `&`
    spec.py          `MaskSpec`, and `normalize`, which turns a Mask into one
    materialize.py   the dense tensors that the reference sees
    memo.py          the rule for what is kept from call to call
    picture.py       draws a mask
    recognize.py     finds out that a tensor is torch.nn's causal mask
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
