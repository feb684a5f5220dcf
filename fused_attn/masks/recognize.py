"""Detection of torch.nn's causal mask in the mask arguments of modules."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import plain_eager
from fused_attn.masks.mask import Mask
from fused_attn.masks.memo import recall_on_tensor


def is_causal_mask(mask: Tensor | Mask | None, hint: bool | None) -> bool:
    """Return True if `mask` is known to be the causal (L, L) mask of torch.nn.

    The result is cached for the lifetime of the tensor; results for slices are cached on their base
    tensor. Values are compared again after an in-place change by a torch operation. Changes through
    numpy or `.data` are not detected.

    Only masks on the CPU are compared, because reading values on a GPU would synchronize. A mask on
    a GPU is treated as dense, and its tile summary still lets kernels skip fully masked tiles.
    Masks that require grad are not compared. Under torch.compile no mask is compared, because that
    would break the graph.

    Args:
        mask: (L, S), bool (True = ignored) or float (added to the scores).
        hint: returned unchanged if not None; the mask is then not compared.
    """
    if hint is not None:
        return hint
    if not isinstance(mask, Tensor) or mask.requires_grad or mask.dim() != 2:
        return False
    if mask.shape[0] != mask.shape[1] or mask.device.type != "cpu":
        return False
    if not plain_eager(mask):
        return False
    return recall_on_tensor(mask, "causal", (mask,), lambda: _compare(mask))


def _compare(mask: Tensor) -> bool:
    ignored = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, ignored)
    causal = torch.zeros(mask.shape, dtype=mask.dtype).masked_fill_(ignored, float("-inf"))
    return torch.equal(mask, causal)
