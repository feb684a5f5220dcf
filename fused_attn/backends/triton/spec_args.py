"""Conversion of a MaskSpec to kernel arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.triton.masks import MaskArgs, NoMask
from fused_attn.backends.triton.tiles import Summaries
from fused_attn.base.layout import kernel_strides
from fused_attn.masks.fields import DIMENSIONS, refuse_unknown_fields
from fused_attn.masks.spec import MaskSpec
from fused_attn.masks.tables import TABLES, refuse_tables

_CONTIGUOUS_ROWS = ("query_documents", "key_documents")


def mask_args(spec: MaskSpec, words: Tensor | None = None) -> MaskArgs | NoMask:
    """Return the tensors and strides of a mask. Broadcast dimensions have stride 0.

    Args:
        words: the dense mask as bits; not needed by kernels that classify tiles.
    """
    refuse_unknown_fields(spec, "triton")
    refuse_tables(spec, "triton")
    if words is None and all(getattr(spec, name) is None for name in DIMENSIONS):
        return NoMask()
    fields: dict[str, Any] = {}
    for name, dimensions in DIMENSIONS.items():
        if name in ("dense", *TABLES):
            continue
        tensor = getattr(spec, name)
        if tensor is not None and tensor.dtype == torch.bool:
            tensor = tensor.view(torch.uint8)
        if name in _CONTIGUOUS_ROWS:
            tensor, dimensions = None if tensor is None else kernel_strides(tensor), dimensions[0]
        if name == "bounds":
            fields[name] = None if tensor is None else tensor.contiguous()
            continue
        fields[name] = tensor
        for d, dimension in enumerate(dimensions.lower()):
            if dimension == "1":
                continue
            stride = 0 if tensor is None or tensor.shape[d] == 1 else tensor.stride(d)
            fields[f"{name}_stride_{dimension}"] = stride
    strides = (0, 0, 0) if words is None else words.stride()
    for d, dimension in enumerate("bhw"):
        broadcast = words is None or words.shape[d] == 1
        fields[f"words_stride_{dimension}"] = 0 if broadcast else strides[d]
    return MaskArgs(words=words, **fields)


def summaries(spec: MaskSpec, summarize: Callable[[Tensor], Tensor]) -> Summaries:
    """Return the tile summaries of a mask.

    Args:
        summarize: computes a summary that the spec does not have.
    """
    fields: dict[str, Any] = {}
    for name in ("dense", "bias"):
        tensor, summary = getattr(spec, name), getattr(spec, f"{name}_summary")
        if tensor is not None and summary is None:
            summary = summarize(tensor)
        # Test for broadcasting with the sizes of the mask. A summary dimension of size 1 may also
        # be the only tile of a dimension that is not broadcast.
        strides = (0, 0, 0, 0) if summary is None else (
            0 if size == 1 else stride
            for size, stride in zip(tensor.shape, summary.stride(), strict=True)
        )  # fmt: skip
        fields[name] = summary
        fields |= zip((f"{name}_stride_{d}" for d in "bhqk"), strides, strict=True)
    return Summaries(**fields)
