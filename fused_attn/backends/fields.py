"""Python counterparts of csrc/params.h, shared by the backends with compiled modules."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_attn.call.attention import AttentionCall
from fused_attn.call.norm import NormCall

# Values of enum DType in csrc/params.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


# MaskSpec fields that csrc/fields omits, because hand-written bindings or only Python read them.
_NOT_LISTED = {"max_seqlen_q", "max_seqlen_k", "by_query"}


def check_fields(known: Iterable[str]) -> None:
    """Raise ImportError if a compiled module does not read all fields of a call.

    This happens if the module was built from other sources.

    Args:
        known: names of the fields that the module reads, from csrc/fields.
    """
    unknown = {*AttentionCall.NAMES, *NormCall.NAMES} - _NOT_LISTED - set(known)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ImportError(
            f"the compiled module was built from another version of the sources and does not read "
            f"the call fields {names}: rebuild it"
        )


def empty_summary(tensor: Tensor, tile: tuple[int, int]) -> Tensor:
    """Allocate an uninitialized uint8 summary of a dense mask or bias.

    Args:
        tensor: (batch, num_heads, seqlen_q, seqlen_k).
        tile: size (queries, keys) of the tile that each element of the summary describes.
    """
    batch, num_heads, seqlen_q, seqlen_k = tensor.shape
    shape = (batch, num_heads, -(-seqlen_q // tile[0]), -(-seqlen_k // tile[1]))
    return torch.empty(shape, dtype=torch.uint8, device=tensor.device)
