"""Nested tensors, which torch.nn.TransformerEncoder hands to its layers in inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_padded(function: Callable[[Tensor, Tensor], Tensor], nested: Tensor) -> Tensor:
    """function of a nested tensor, made of one of padded sequences.

    Args:
        function: of padded, (N, S, *), and ignored, (N, S), True for padding; gives (N, S, *).
        nested: N sequences.

    Returns:
        Nested: the sequences of the result without their padding.
    """
    lengths = [sequence.shape[0] for sequence in nested.unbind()]
    if not any(lengths):
        return nested.clone()  # torch pads nothing where nothing is
    padded = nested.to_padded_tensor(0.0)
    positions = torch.arange(padded.shape[1], device=padded.device)
    ignored = positions >= torch.tensor(lengths, device=padded.device)[:, None]
    out = function(padded, ignored)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=nested.layout)
