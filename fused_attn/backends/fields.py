"""Python counterparts of csrc/params.h, shared by the backends with compiled modules."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_attn.call.calls import AttentionCall, NormCall

# enum DType in csrc/params.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


# Fields of MaskSpec that hand-written bindings read, or that only Python reads.
_NOT_LISTED = {"max_seqlen_q", "max_seqlen_k", "by_query"}


def check_fields(known: Iterable[str]) -> None:
    """Raise ImportError if calls have fields that a module, built from other sources, lacks.

    Args:
        known: the fields in the csrc/fields that the module was built from.
    """
    unknown = {*AttentionCall.NAMES, *NormCall.NAMES} - _NOT_LISTED - set(known)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ImportError(f"the compiled module does not read {names} of calls: build it anew")


def empty_summary(tensor: Tensor, tile: tuple[int, int]) -> Tensor:
    """Allocate an uninitialised summary of a dense mask or bias.

    Args:
        tile: rows and columns of the tile that one element summarizes.
    """
    batch, num_heads, seqlen_q, seqlen_k = tensor.shape
    shape = (batch, num_heads, -(-seqlen_q // tile[0]), -(-seqlen_k // tile[1]))
    return torch.empty(shape, dtype=torch.uint8, device=tensor.device)
