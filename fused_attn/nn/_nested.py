"""Support for nested tensors, which torch.nn.TransformerEncoder passes to layers in inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_padded(function: Callable[[Tensor, Tensor], Tensor], nested: Tensor) -> Tensor:
    """Pad a nested tensor, apply a function to it, and remove the padding from the result.

    Args:
        function: function of the padded tensor, (N, S, *), and a bool mask, (N, S), which is True
            for padding. Must return a tensor of shape (N, S, *).
        nested: nested tensor of N sequences.

    Returns:
        A nested tensor with the layout and the sequence lengths of `nested`. A contiguous jagged
        result shares the offsets of `nested`, so that torch can add the two.
    """
    lengths = [sequence.shape[0] for sequence in nested.unbind()]
    if not any(lengths):
        return nested.clone()  # torch cannot pad a nested tensor without elements
    padded = nested.to_padded_tensor(0.0)
    positions = torch.arange(padded.shape[1], device=padded.device)
    ignored = positions >= torch.tensor(lengths, device=padded.device)[:, None]
    out = function(padded, ignored)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    if nested.layout == torch.jagged and nested.is_contiguous():
        offsets = nested.offsets()  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(
            torch.cat(rows), offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
        )
    return torch.nested.as_nested_tensor(rows, layout=nested.layout)
