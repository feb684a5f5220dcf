"""Cache of values derived from tensors, shared between calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fused_attn.base.torch_state import PLAIN_TYPES, captured, is_intercepted, stream_of

T = TypeVar("T")

_LIMIT = 16  # entries per Mask: decoding changes seqlen_k in every step
_LIMIT_OF_TENSOR = 1024  # entries per tensor: small values, such as a bool for each slice


class Entry(NamedTuple):
    """A cached value and its sources."""

    sources: list[tuple[weakref.ref[Tensor], int, int]]  # tensors, their versions and addresses
    value: object


Memo = dict[Hashable, Entry]  # the cache of a Mask or a tensor; only `recall` fills it


def recall(
    memo: Memo,
    key: Hashable,
    tensors: Sequence[Tensor],
    device: torch.device,
    make: Callable[[], T],
    limit: int = _LIMIT,
) -> T:
    """Return the cached result of make(); compute it if missing or if the tensors changed.

    A cached value is reused for the same key, tensors, tensor versions, stream and inference mode.
    The cache is bypassed in three cases: calls are intercepted (torch.compile, modes, subclasses);
    a tensor requires grad, or has no version because it was created in inference mode; or a CUDA
    graph is being captured, which must compute its values itself.

    Each in-place operation of torch changes the version of a tensor. Changes through numpy, `.data`
    or another library's kernel do not, and are not detected: pass a new tensor after them.

    The memo holds weak references to the tensors. A value that references one keeps it alive for
    the lifetime of the memo.

    Args:
        memo: cache of a Mask or a tensor.
        key: what the value depends on, other than the tensors.
        tensors: tensors that the value is derived from.
        device: device that uses the value; its current stream computes it.
        make: computes the value.
        limit: maximum number of entries; the oldest are evicted first.
    """
    if is_intercepted() or not cacheable(tensors):
        return make()
    return recall_eager(memo, key, tensors, device, make, limit)


# By the id of a tensor, which is unique while the reference is alive.
_of_tensors: dict[int, tuple[weakref.ref[Tensor], Memo]] = {}


def recall_on_tensor(
    tensor: Tensor,
    key: Hashable,
    tensors: Sequence[Tensor],
    make: Callable[[], T],
    limit: int | None = None,
) -> T:
    """Call `recall` with the memo of `tensor`; the value must not hold a reference to it."""
    if is_intercepted() or not cacheable(tensors):
        return make()
    limit = limit or _LIMIT_OF_TENSOR
    return recall_eager(memo_of(tensor), key, tensors, tensor.device, make, limit)


def memo_of(tensor: Tensor) -> Memo:
    """Return the memo of a tensor, which is deleted together with the tensor."""
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
    """Implement `recall` for tensors that are `cacheable`, in a call that is not intercepted."""
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
    memo.pop(key, None)  # reinsert as the newest entry
    memo[key] = Entry([(weakref.ref(t), t._version, t.data_ptr()) for t in tensors], value)
    while len(memo) > limit:  # the copy and the default: other threads may evict too
        memo.pop(next(iter(list(memo)), None), None)
    return value


def cacheable(tensors: Sequence[Tensor]) -> bool:
    """Return True if in-place changes of these tensors can be detected."""
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES or tensor.requires_grad or tensor.is_inference():
            return False
        if captured(tensor):
            return False
    return True
