"""Checksums of masks, with which processes check that they use the same mask."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fused_attn.integrations.bytecode import closure_of, codes
from fused_attn.masks.mask import Mask
from fused_attn.masks.memo import recall_on_tensor

_CHUNK = 1 << 22  # maximum number of elements that are converted to int64 together
_FACTOR = 0x5851F42D4C957F2D  # odd; Knuth, MMIX


def checksum(mask: Mask | None, tensors: Sequence[Tensor | None] = ()) -> int:
    """Return a 32-bit checksum of a mask and of further tensors, such as cu_seqlens.

    It is equal in all processes. It ignores the values of tensors that require grad. The values of
    other tensors are read once, unless they change; on a GPU, this synchronizes.
    """
    return zlib.crc32(repr((_described(mask), [_described(t) for t in tensors])).encode())


def _described(value: Any, seen: dict[Any, int] | None = None) -> Any:
    """Return a value whose repr describes a mask or a part of it completely.

    Args:
        seen: maps each function that is described already to its number.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        content = 0 if value.requires_grad else _content(value)
        return tuple(value.shape), str(value.dtype), value.requires_grad, content
    if isinstance(value, (tuple, list)):
        return [_described(item, seen) for item in value]
    if is_dataclass(value):
        parts = [(f.name, getattr(value, f.name)) for f in fields(value) if f.compare]
        return [(name, _described(part, seen)) for name, part in parts]
    if callable(value):  # its repr contains an address
        code = getattr(value, "__code__", None)
        if code is None:
            return type(value).__qualname__
        if value in seen:
            return seen[value]
        seen[value] = len(seen)
        bodies = [
            (c.co_code, c.co_names, [x for x in c.co_consts if not hasattr(x, "co_code")])
            for c in codes(code)
        ]
        named = {**closure_of(value), **(value.__kwdefaults__ or {})}
        read = _described([value.__defaults__, *named.items()], seen)
        return value.__qualname__, bodies, read
    return value


def _content(tensor: Tensor) -> int:
    return recall_on_tensor(tensor, "checksum", (tensor,), lambda: _sum_of_bits(tensor.detach()))


def _sum_of_bits(tensor: Tensor) -> int:
    """Return a checksum of the elements and their order, computed on the tensor's device."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().flatten().view(integers[tensor.dtype.itemsize])
    if bits.device.type == "cpu":
        return zlib.crc32(bits.numpy().tobytes())
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), _CHUNK):
        part = bits[first : first + _CHUNK].long()
        place = torch.arange(first + 1, first + 1 + len(part), device=bits.device)
        # Integer overflow wraps around. The factor of the place makes the sum depend on the order.
        total = total + ((part + 1) * _FACTOR * (2 * place + 1)).sum()
    return int(total)
