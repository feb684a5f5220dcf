"""Cache of values derived from tensors, shared between calls and layers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fused_attn.base.torch_state import PLAIN_TYPES, captured, is_intercepted, stream_of

T = TypeVar("T")

# Maximum entries per Mask. Decoding changes seqlen_k, and with it the key, in every step.
_LIMIT = 16
# Maximum entries per tensor. The limit is high because most values are small, such as one bool per
# slice.
_LIMIT_OF_TENSOR = 1024


class Entry(NamedTuple):
    """A cached value and the tensors that it was derived from.

    Attributes:
        sources: for each tensor a weak reference, its version counter and its data pointer.
        read: as sources, for the tensors that `note_reads` recorded during the computation.
        value: the cached value.
    """

    sources: list[_Source]
    read: list[_Source]
    value: object


_Source = tuple[weakref.ref[Tensor], int, int]
Memo = dict[Hashable, Entry]  # cache of one Mask or tensor; modified only in this file


_of_thread = threading.local()  # .computing: the reads of each value that is being computed


def note_reads(tensors: Iterable[Tensor]) -> None:
    """Record tensors as dependencies of all values that this thread is computing.

    The callers of `recall` do not need to pass them.
    """
    for read in getattr(_of_thread, "computing", ()):
        read.update((id(tensor), tensor) for tensor in tensors)


def recall(
    memo: Memo,
    key: Hashable,
    tensors: Sequence[Tensor],
    device: torch.device,
    make: Callable[[], T],
    limit: int = _LIMIT,
) -> T:
    """Return the cached result of make(); call it if there is no entry or the tensors changed.

    A cached value is reused for the same key, tensors, tensor versions, stream and inference mode.
    The cache is bypassed, and make() is called, in these cases:

    - the call is intercepted (torch.compile, modes), or a tensor is of a subclass;
    - a tensor requires grad;
    - a tensor was created in inference mode, and therefore has no version counter;
    - a CUDA graph is being captured, which must include the kernels that compute the value.

    Every in-place operation of torch increments the version counter of the tensor. Changes through
    numpy, `.data` or another library's kernel do not, so they are not detected. Pass a new tensor
    after such a change.

    The memo holds only weak references to the tensors. A value that references one of the tensors
    keeps it alive as long as the entry exists.

    Args:
        memo: cache of a Mask or a tensor.
        key: everything that the value depends on, other than the tensors.
        tensors: tensors that the value is derived from.
        device: device on which the value is computed and used, on the current stream.
        make: computes the value.
        limit: maximum number of entries; the oldest are evicted first.
    """
    if is_intercepted() or not cacheable(tensors):
        return make()
    return recall_eager(memo, key, tensors, device, make, limit)


# Values read while a CUDA graph was captured, by id. Replays read their memory. torch does not
# report the deletion of a graph, so the values live until the process ends.
_of_graphs: dict[int, object] = {}

# Maps id(tensor) to the memo of the tensor. An id is unique only while its tensor is alive, so
# `memo_of` compares the referenced tensor.
_of_tensors: dict[int, tuple[weakref.ref[Tensor], Memo]] = {}


def recall_on_tensor(
    tensor: Tensor,
    key: Hashable,
    tensors: Sequence[Tensor],
    make: Callable[[], T],
    limit: int | None = None,
) -> T:
    """Call `recall` with the memo of `tensor`, which has the lifetime of the tensor.

    Slicing creates a new view object each time. If a view is the only source, its value is cached
    on the base tensor, under the address, dtype, shape and strides of the view. The value must not
    reference `tensor`, which would then never be freed. The limit defaults to _LIMIT_OF_TENSOR.
    """
    if is_intercepted():
        return make()
    if len(tensors) == 1 and tensor._base is not None and cacheable((tensor,)):
        key = (key, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr())
        tensor = tensor._base
        tensors = (tensor,)
    if not cacheable(tensors):
        return make()
    limit = limit or _LIMIT_OF_TENSOR
    return recall_eager(memo_of(tensor), key, tensors, tensor.device, make, limit)


def memo_of(tensor: Tensor) -> Memo:
    """Return the memo of a tensor, creating it if missing; it is deleted with the tensor."""
    number = id(tensor)
    entry = _of_tensors.get(number)
    if entry is None or entry[0]() is not tensor:
        # A default argument, because the module's globals are None when the interpreter exits.
        def forget(ref: weakref.ref[Tensor], entries: Any = _of_tensors) -> None:
            if entries.get(number, (None,))[0] is ref:
                del entries[number]

        entry = _of_tensors[number] = weakref.ref(tensor, forget), {}
    return entry[1]


def recall_eager(
    memo: Memo,
    key: Hashable,
    tensors: Sequence[Tensor],
    device: torch.device,
    make: Callable[[], T],
    limit: int = _LIMIT,
) -> T:
    """Implement `recall` without its checks.

    The caller ensures that the tensors are `cacheable` and the call is not intercepted.
    """
    stream = 0 if device.type == "cpu" else stream_of(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    key = (key, stream, torch.is_inference_mode_enabled())
    entry = memo.get(key)
    if entry is not None and len(entry.sources) == len(tensors):
        current, sources = tensors, entry.sources
        if entry.read:  # copying the lists takes 0.5 us
            read: list[Any] = [ref() for ref, _, _ in entry.read]
            current, sources = [*tensors, *read], sources + entry.read
        for tensor, (ref, version, address) in zip(current, sources, strict=True):
            if tensor is None or ref() is not tensor:
                break
            if tensor._version != version or tensor.data_ptr() != address:
                break
        else:
            if entry.read:
                note_reads(read)
            if capturing:
                _of_graphs[id(entry.value)] = entry.value
            return entry.value  # type: ignore[return-value]
    computing: list[dict[int, Tensor]] = _of_thread.__dict__.setdefault("computing", [])
    computing.append({})
    try:
        value = make()
    finally:
        found = list(computing.pop().values())
    memo.pop(key, None)  # dicts are in insertion order: the new entry becomes the newest
    # Not cached: a value computed during graph capture is undefined until the graph is replayed.
    if capturing or not cacheable(found):
        return value
    memo[key] = Entry(_sources(tensors), _sources(found), value)
    # Other threads may evict concurrently: iterate over a copy of the keys, and allow for an empty
    # memo and for a key that is already gone.
    while len(memo) > limit:
        memo.pop(next(iter(list(memo)), None), None)
    return value


def _sources(tensors: Sequence[Tensor]) -> list[_Source]:
    return [(weakref.ref(t), t._version, t.data_ptr()) for t in tensors]


def cacheable(tensors: Sequence[Tensor]) -> bool:
    """Return True if values derived from these tensors may be cached (see `recall`)."""
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES or tensor.requires_grad or tensor.is_inference():
            return False
        if captured(tensor):
            return False
    return True
