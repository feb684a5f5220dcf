"""Recognition of the causal mask of torch.nn among the masks that modules are given."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import host_readable
from fused_attn.masks.mask import Mask
from fused_attn.masks.memo import recall_of


def is_causal_mask(mask: Tensor | Mask | None, hint: bool | None) -> bool:
    """The hint, or whether `mask` is the causal (L, L) mask of torch.nn where that can be seen.

    The values are compared once, and again after an in-place change by torch operations (one
    through numpy or `.data` is not noticed, as for Masks): the verdict is kept for the tensor, and
    for slices of it, as long as it lives. Only masks on the CPU are looked at. On a GPU
    that would take a synchronisation; there the mask is a dense one, of which a kernel sums up the
    tiles, so that hidden tiles are skipped all the same. Nor is it looked at under torch.compile
    (graph break), or if it is learned.

    Args:
        mask: (L, S), bool (True = ignored) or float (added to the scores).
        hint: what the caller knows; None to find out.
    """
    if hint is not None:
        return hint
    if not isinstance(mask, Tensor) or mask.requires_grad or mask.dim() != 2:
        return False
    if mask.shape[0] != mask.shape[1] or not host_readable(mask):
        return False
    # Slices of one tensor are other objects in each call: their owner's memo has their verdicts.
    owner = mask if mask._base is None else mask._base
    where = ("causal", mask.dtype, mask.data_ptr(), mask.shape, mask.stride())
    return recall_of(owner, where, [owner], lambda: _compare(mask))


def _compare(mask: Tensor) -> bool:
    ignored = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, ignored)
    causal = torch.zeros(mask.shape, dtype=mask.dtype).masked_fill_(ignored, float("-inf"))
    return torch.equal(mask, causal)
