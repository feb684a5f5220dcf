"""Detection of torch.nn's causal mask in the mask arguments of modules."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import host_readable
from fused_attn.masks.mask import Mask
from fused_attn.masks.memo import recall_on_tensor


def is_causal_mask(mask: Tensor | Mask | None, hint: bool | None) -> bool:
    """Return the hint, or True if `mask` is known to be the causal (L, L) mask of torch.nn.

    The values are compared once, and again after an in-place change by torch operations. As for
    Masks, changes through numpy or `.data` are not detected. The result is cached for the lifetime
    of the tensor, also for slices of it.

    Only masks on the CPU are compared. On a GPU, reading values would synchronise. The mask is then
    treated as dense, and its tile summary still lets kernels skip fully masked tiles. Masks are not
    compared under torch.compile (graph break), or if they require grad.

    Args:
        mask: (L, S), bool (True = ignored) or float (added to the scores).
        hint: the result if the caller knows it; None to compare.
    """
    if hint is not None:
        return hint
    if not isinstance(mask, Tensor) or mask.requires_grad or mask.dim() != 2:
        return False
    if mask.shape[0] != mask.shape[1] or not host_readable(mask):
        return False
    # A slice is a new object in each call, so its result is cached in the memo of its base.
    owner = mask if mask._base is None else mask._base
    where = ("causal", mask.dtype, mask.data_ptr(), mask.shape, mask.stride())
    return recall_on_tensor(owner, where, [owner], lambda: _compare(mask))


def _compare(mask: Tensor) -> bool:
    ignored = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, ignored)
    causal = torch.zeros(mask.shape, dtype=mask.dtype).masked_fill_(ignored, float("-inf"))
    return torch.equal(mask, causal)
