"""The one rule for what is kept from call to call: all that is derived of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fused_attn.base.torch_state import PLAIN_TYPES, captured, is_intercepted, stream_of

T = TypeVar("T")

_LIMIT = 16  # values of a Mask: decoding changes seqlen_k in every step
_LIMIT_OF_TENSOR = 1024  # of a tensor: verdicts on its slices, say, which are small


class Entry(NamedTuple):
    """A value, and what it was derived of."""

    sources: list[tuple[weakref.ref[Tensor], int, int]]  # tensors, their versions and addresses
    value: object


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
    and the same inference mode. None is kept, or found, where calls are intercepted (torch.compile,
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
    if is_intercepted() or not keepable(tensors):
        return make()
    return recall_eager(memo, key, tensors, device, make, limit)


# By the id of a tensor, which no other has while the reference is alive.
_of_tensors: dict[int, tuple[weakref.ref[Tensor], Memo]] = {}


def recall_of(
    tensor: Tensor,
    key: Hashable,
    tensors: Sequence[Tensor],
    make: Callable[[], T],
    limit: int | None = None,
) -> T:
    """As `recall`, from a memo that lives as long as `tensor`; the value must not hold that."""
    if is_intercepted() or not keepable(tensors):
        return make()
    limit = limit or _LIMIT_OF_TENSOR
    return recall_eager(memo_of(tensor), key, tensors, tensor.device, make, limit)


def memo_of(tensor: Tensor) -> Memo:
    """The memo of a tensor, which goes with it."""
    number = id(tensor)
    held = _of_tensors.get(number)
    if held is None or held[0]() is not tensor:

        def forget(ref: weakref.ref[Tensor]) -> None:
            if _of_tensors.get(number, (None,))[0] is ref:
                del _of_tensors[number]

        held = _of_tensors[number] = weakref.ref(tensor, forget), {}
    return held[1]


def recall_eager(
    memo: Memo,
    key: Hashable,
    tensors: Sequence[Tensor],
    device: torch.device,
    make: Callable[[], T],
    limit: int = _LIMIT,
) -> T:
    """`recall` for tensors that are `keepable`, in a call that is not intercepted."""
    stream = 0 if device.type == "cpu" else stream_of(device)
    key = (key, stream, torch.is_inference_mode_enabled())
    entry = memo.get(key)
    if entry is not None and len(entry.sources) == len(tensors):
        for tensor, (ref, version, address) in zip(tensors, entry.sources, strict=True):
            if ref() is not tensor or tensor._version != version or tensor.data_ptr() != address:
                break
        else:
            return entry.value  # type: ignore[return-value]
    value = make()
    memo.pop(key, None)  # the newest is last
    memo[key] = Entry([(weakref.ref(t), t._version, t.data_ptr()) for t in tensors], value)
    while len(memo) > limit:  # a copy, and no error, as other threads do the same
        memo.pop(next(iter(list(memo)), None), None)
    return value


def keepable(tensors: Sequence[Tensor]) -> bool:
    """Return True if in-place changes of these tensors can be detected."""
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES or tensor.requires_grad or tensor.is_inference():
            return False
        if captured(tensor):
            return False
    return True
