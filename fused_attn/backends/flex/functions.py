"""FlexAttention for a pattern of operands: mask_mod, score_mod, and the call.

All masks are tensors, read by functions of the position (batch, head, query, key). Compiled
FlexAttention traces these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_attn.backends.flex.operands import Operands, Pattern

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Variant(NamedTuple):
    """Key of a compiled function: everything except the sizes of batch and sequences.

    Attributes:
        pattern: operands of the mask, and their dimensions.
        scale, softcap: constants of the kernel; softcap 0 means none.
        want_lse: also return lse.
        engine: FlexAttention's kernel_options["BACKEND"], "TRITON" or "FLASH".
        block_size: queries and keys of a block.
        device_type: device type of all tensors.
        constants: other values that torch.compile specializes on: heads, head_dims, dtypes, if
            gradients are computed, and which sizes of query, key and block lists are 1.
    """

    pattern: Pattern
    scale: float
    softcap: float
    want_lse: bool
    engine: str
    block_size: tuple[int, int]
    device_type: str
    constants: tuple[Hashable, ...]


def attend(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor, operands: Operands
) -> tuple[Tensor, Tensor | None]:
    """Call FlexAttention; return out, and lse if the variant requests it."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    if operands.unmasked is not None:
        unmasked = operands.unmasked[..., None]
        key, value = torch.where(unmasked, key, 0.0), torch.where(unmasked, value, 0.0)
    block_mask = None
    if operands.lists is not None:
        mask_mod = mask_function(variant.pattern, operands)
        sizes = (query.shape[2], key.shape[2])
        block_mask = BlockMask(
            sizes, *operands.lists, BLOCK_SIZE=variant.block_size, mask_mod=mask_mod
        )
    # "AUTO" would choose another kernel for fewer than 128 queries.
    options: Any = {"BACKEND": variant.engine}
    results: Any = flex_attention(
        query,
        key,
        value,
        score_function(variant, operands),
        block_mask,
        variant.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True) if variant.want_lse else None,
        kernel_options=options,
    )
    if not variant.want_lse:
        return results, None
    out, aux = results
    return out, aux.lse


def mask_function(pattern: Pattern, operands: Operands) -> MaskMod:
    """Return mask_mod, which returns True for visible positions.

    Intervals need two comparisons of the key with tables of the queries. On Blackwell, the FLASH
    engine of FlexAttention evaluates these for 32 keys at once.
    """
    begin, end, key_mask, dense = operands.begin, operands.end, operands.key_mask, operands.dense
    queries, keys = operands.query_documents, operands.key_documents
    of_sequence = _sequence_index(pattern, operands)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        rows = pattern.begin
        visible = (k >= _at(begin, rows, b, h, q, k)) & (k < _at(end, rows, b, h, q, k))
        if queries is not None:
            wanted = _at(queries, pattern.query_documents, b, h, q, k)
            visible = visible & (wanted == _at(keys, pattern.key_documents, b, h, q, k))
        if key_mask is not None:
            visible = visible & _at(key_mask, pattern.key_mask, b, h, q, k)
        if dense is not None:
            b, q, k = of_sequence(b, q, k, dense, pattern.dense)
            visible = visible & _at(dense, pattern.dense, b, h, q, k)
        return visible

    return mask_mod


def score_function(variant: Variant, operands: Operands) -> ScoreMod | None:
    """Return score_mod: softcap, then bias and ALiBi, in the order of the reference, or None."""
    pattern, softcap = variant.pattern, variant.softcap
    bias, slopes, diagonal = operands.bias, operands.slopes, operands.diagonal
    if softcap == 0.0 and bias is None and slopes is None:
        return None
    of_sequence = _sequence_index(pattern, operands)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap > 0.0:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            place = of_sequence(b, q, k, bias, pattern.bias)
            score = score + _at(bias, pattern.bias, place[0], h, place[1], place[2])
        if slopes is not None:
            sequence, _, _ = of_sequence(b, q, k, slopes, pattern.slopes)
            distance = (_at(diagonal, pattern.diagonal, b, h, q, k) - k).abs()
            score = score - _at(slopes, pattern.slopes, sequence, h, q, k) * distance
        return score

    return score_mod


def _at(table: Any, letters: str, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the element of a table at a position; `letters` name its dimensions."""
    place = {"b": b, "h": h, "q": q, "k": k}
    return table[tuple([place[letter] for letter in letters])]


def _sequence_index(pattern: Pattern, operands: Operands) -> Callable[..., Any]:
    """Return a function that maps a position to indices in a table of separate sequences.

    Without packed sequences, these are the indices in the batch.
    """
    sequence, position, first_key = operands.sequence, operands.position, operands.first_key

    def unchanged(b: Tensor, q: Tensor, k: Tensor, table: Tensor, letters: str) -> Any:
        return b, q, k

    def within(b: Tensor, q: Tensor, k: Tensor, table: Tensor, letters: str) -> Any:
        assert sequence is not None and position is not None and first_key is not None
        key = k
        if "k" in letters:  # keys of other sequences, which are masked, stay within the table
            key = (k - first_key[q]).clamp(0, table.shape[-1] - 1)
        return sequence[q], position[q], key

    return within if pattern.packed else unchanged
