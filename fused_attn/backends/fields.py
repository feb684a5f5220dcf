"""csrc/params.h in Python: the common part of the backends whose kernels are compiled modules."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_attn.call.calls import AttentionCall, NormCall

# enum DType of csrc/params.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def check_fields(known: Iterable[str]) -> None:
    """Raises ImportError where calls have fields that a module does not read: it was built of
    other sources."""
    unknown = {*AttentionCall.NAMES, *NormCall.NAMES} - set(known)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ImportError(f"the compiled module does not read {names} of calls: build it anew")


def empty_summary(tensor: Tensor, tile: tuple[int, int]) -> Tensor:
    """An empty summary of a dense mask or bias.

    Args:
        tile: rows and columns of what an element sums up.
    """
    batch, num_heads, seqlen_q, seqlen_k = tensor.shape
    shape = (batch, num_heads, -(-seqlen_q // tile[0]), -(-seqlen_k // tile[1]))
    return torch.empty(shape, dtype=torch.uint8, device=tensor.device)
