"""Attention masks: what users compose, what kernels see of it, and what the reference sees.

A mask is interpreted in this folder and nowhere else.

    mask.py          `Mask`, the functions that make one, and `&`
    spec.py          `MaskSpec`, and `normalize`, which turns a Mask into one
    recognize.py     whether a tensor is torch.nn's causal mask
"""

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
