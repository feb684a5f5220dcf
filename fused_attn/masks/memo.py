"""The one rule for what is kept from call to call: all that is derived of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from fused_attn.core.torch_state import captured, plain_eager, stream_of

T = TypeVar("T")

_LIMIT = 16  # values of a Mask: decoding changes seqlen_k in every step
_LIMIT_OF_TENSOR = 1024  # of a tensor: verdicts on its slices, say, which are small


class Entry(NamedTuple):
    """A value, and what it was derived of."""

    tensors: tuple[TensorWeakRef, ...]
    versions: tuple[Any, ...]
    value: Any


Memo = dict[Hashable, Entry]  # what a Mask or a tensor keeps; `recall` alone fills it


def recall(
    memo: Memo,
    key: Hashable,
    tensors: Sequence[Tensor],
    device: torch.device,
    make: Callable[[], T],
    limit: int = _LIMIT,
) -> T:
    """make(), or what it gave before while its tensors are what they were.

    A value is found again for the same key, the same tensors in the same versions, the same stream
    and the same inference mode. None is kept, or found, where the calls are watched (torch.compile,
    modes, subclasses), where a tensor requires a gradient or was made in inference mode and so has
    no version, and while a CUDA graph is captured: what is derived there is the graph's own.

    A version changes with in-place operations of torch. Changes through numpy, `.data` or another
    library's kernel have none, and are not seen: pass a new tensor after them.

    Tensors are held weakly; a value that holds one keeps it for as long as the memo lives.

    Args:
        memo: where it is kept: a Mask's, or a tensor's.
        key: what the value depends on besides the tensors.
        tensors: what the value is derived of.
        device: where the value is used; its current stream computes it.
        make: computes the value.
        limit: values of the memo; the oldest go first.
    """
    if not _keepable(tensors):
        return make()
    key = (key, stream_of(device), torch.is_inference_mode_enabled())
    versions = tuple([(t._version, t.data_ptr()) for t in tensors])
    entry = memo.get(key)
    if entry is not None and entry.versions == versions:
        for ref, tensor in zip(entry.tensors, tensors, strict=True):
            if ref() is not tensor:
                break
        else:
            return entry.value
    value = make()
    memo.pop(key, None)  # the newest is last
    memo[key] = Entry(tuple(map(TensorWeakRef, tensors)), versions, value)
    while len(memo) > limit:  # a copy, and no error, as other threads do the same
        memo.pop(next(iter(list(memo)), None), None)
    return value


_of_tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def recall_of(
    tensor: Tensor,
    key: Hashable,
    tensors: Sequence[Tensor],
    make: Callable[[], T],
    limit: int | None = None,
) -> T:
    """As `recall`, from a memo that lives as long as `tensor`; the value must not hold that."""
    if not _keepable([tensor]):
        return make()
    memo = _of_tensors.get(tensor)
    if memo is None:
        memo = _of_tensors[tensor] = {}
    return recall(memo, key, tensors, tensor.device, make, limit or _LIMIT_OF_TENSOR)


def _keepable(tensors: Sequence[Tensor]) -> bool:
    if not plain_eager(*tensors) or captured(*tensors):
        return False
    return not any(tensor.requires_grad or tensor.is_inference() for tensor in tensors)
