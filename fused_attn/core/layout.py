"""The layouts of tensors that kernels read in place."""

from __future__ import annotations

from torch import Tensor


def readable_in_place(tensor: Tensor) -> Tensor:
    """Kernels read any strides whose last one is 1, and no lazy negation; others are copied."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return (tensor if dense else tensor.contiguous()).resolve_neg()
