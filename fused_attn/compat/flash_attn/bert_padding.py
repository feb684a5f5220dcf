"""flash_attn.bert_padding: conversion between padded batches and packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.call.packed import cumulative


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the given rows of a tensor, differentiably."""
    return input[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int, nonzero for real tokens.
        unused_mask: as attention_mask; additional tokens that get a row but are not used.

    Returns:
        The rows (total, ...), their indices in the flattened batch, cumulative lengths (batch + 1,)
        in int32, the longest length, and the number of used tokens of each sequence.
    """
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = hidden_states.flatten(0, 1)[indices]
    return rows, indices, cumulative(lengths), int(lengths.max()), used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return the padded batch (batch, seqlen, ...) of packed rows, with zeros as padding."""
    whole = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return whole.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
