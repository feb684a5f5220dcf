"""Cache of values that are derived from a mask on the host, such as plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from fused_attn.masks.memo import recall_on_spec
from fused_attn.masks.spec import MaskSpec

T = TypeVar("T")

_LIMIT = 64  # number of values per mask with tensors, and of all masks without
_of_numbers: OrderedDict[Hashable, Any] = OrderedDict()


def cached_on_mask(
    spec: MaskSpec,
    what: Hashable,
    device: torch.device,
    make: Callable[[], T],
    *,
    with_bias: bool,
) -> T:
    """Return make(), or its cached result for the same mask and the same `what`.

    Masks without tensors are the same if their numbers are equal. Masks with tensors are the same
    if the tensors are, and have not been changed; see `masks.memo.recall`.

    Args:
        what: everything else that the value depends on.
        device: device of the call.
        with_bias: True if the value depends on the bias.
    """
    named = zip(spec.TENSORS, spec.tensors(), strict=True)
    tensors = [t for n, t in named if t is not None and (with_bias or not n.startswith("bias"))]
    if tensors:
        return recall_on_spec(spec, what, tensors, device, make, _LIMIT)
    numbers = tuple(value for value in spec.flat() if isinstance(value, (int, float)))
    key = numbers, what
    if key in _of_numbers:
        _of_numbers.move_to_end(key)
        return _of_numbers[key]
    value = _of_numbers[key] = make()
    if len(_of_numbers) > _LIMIT:
        _of_numbers.popitem(last=False)
    return value
