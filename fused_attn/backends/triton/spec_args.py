"""Conversion of a MaskSpec to kernel arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.triton.masks import MaskArgs
from fused_attn.backends.triton.tiles import Summaries
from fused_attn.base.layout import kernel_strides
from fused_attn.masks.spec import MaskSpec


def mask_args(spec: MaskSpec) -> MaskArgs:
    """Return the tensors and strides of a mask. Broadcast dimensions have stride 0."""
    query_documents, key_documents = (
        None if t is None else kernel_strides(t) for t in (spec.query_documents, spec.key_documents)
    )
    fields: dict[str, Any] = {}
    for name, tensor, dimensions in (
        ("query_documents", query_documents, "b"),
        ("key_documents", key_documents, "b"),
        ("slopes", spec.slopes, "bh"),
        ("key_mask", _bytes(spec.key_mask), "bhqk"),
        ("dense", _bytes(spec.dense), "bhqk"),
        ("bias", spec.bias, "bhqk"),
    ):
        fields[name] = tensor
        for d, dimension in enumerate(dimensions):
            stride = 0 if tensor is None or tensor.shape[d] == 1 else tensor.stride(d)
            fields[f"{name}_stride_{dimension}"] = stride
    bounds = None if spec.bounds is None else spec.bounds.contiguous()
    return MaskArgs(bounds=bounds, **fields)


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


def _bytes(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.view(torch.uint8)
