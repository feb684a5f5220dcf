"""Cache of values that are derived from a mask on the host, such as plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from fused_attn.masks.memo import Memo, recall, recall_on_tensor
from fused_attn.masks.spec import MaskSpec

T = TypeVar("T")

_LIMIT = 64  # number of values per mask with tensors, and of all masks without
_of_numbers: Memo = {}


def cached_on_mask(
    spec: MaskSpec, what: Hashable, device: torch.device, make: Callable[[], T]
) -> T:
    """Return make(), or its cached result for the same mask and the same `what`.

    A mask is the same if its numbers are, and its tensors except bias have not been changed; see
    `masks.memo.recall`. Values must not depend on the bias. A cached value saves time only: whether
    there is one must not decide if ranks communicate.

    Args:
        what: everything else that the value depends on.
        device: device of the call.
    """
    named = {
        name: tensor
        for name, tensor in zip(spec.TENSORS, spec.tensors(), strict=True)
        if tensor is not None and name != "bias" and not name.endswith("_summary")
    }
    numbers = tuple(value for value in spec.flat() if isinstance(value, (int, float)))
    key, tensors = (what, numbers, *named), list(named.values())
    if tensors:
        return recall_on_tensor(tensors[0], key, tensors, make, _LIMIT)
    return recall(_of_numbers, key, (), device, make, _LIMIT)
