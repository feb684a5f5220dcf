"""Checks that all ranks make the same call, so that a mistake is an error and never a hang."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fused_attn.distributed.caching import cached_on_mask
from fused_attn.distributed.ranks import Ranks
from fused_attn.masks.spec import MaskSpec


def check_agreement(
    ranks: Ranks, spec: MaskSpec, values: Mapping[str, int], device: torch.device
) -> None:
    """Raise ValueError unless all ranks pass the same values and the same mask.

    The ranks communicate, once for a mask that does not change. Only the shape of a bias that
    requires grad is compared, because it changes in each training step.

    Args:
        values: named integers, such as sizes. All ranks must use the same names.
    """

    def check() -> bool:
        own = {**values, "attn_mask": checksum(spec)}
        rows = ranks.gather(list(own.values()), device)
        for name, column in zip(own, zip(*rows, strict=True), strict=True):
            if len(set(column)) == 1:
                continue
            got = "different tensors" if name == "attn_mask" else ", ".join(map(str, column))
            raise ValueError(f"{name} must be the same on all {ranks.size} ranks, got {got}")
        return True

    if spec.bias is not None and spec.bias.requires_grad:
        sizes = {f"size {i} of the bias": n for i, n in enumerate(spec.bias.shape)}
        values, spec = {**values, **sizes}, replace(spec, bias=None, bias_summary=None)
    what = ("agreement", ranks.group.group_name, *values.items())
    cached_on_mask(spec, what, device, check, with_bias=True)


def checksum(spec: MaskSpec) -> int:
    """Return a checksum of everything in a mask, in 63 bits.

    On a GPU, it is computed there, and reading it waits for the GPU.
    """
    numbers = [value for value in spec.flat() if isinstance(value, (int, bool))]
    total = zlib.crc32(repr(numbers).encode())
    for name, tensor in zip(spec.TENSORS, spec.tensors(), strict=True):
        if tensor is not None and not name.endswith("_summary"):
            total = zlib.crc32(f"{name}{tuple(tensor.shape)}{_content(tensor)}".encode(), total)
    return total


def _content(tensor: Tensor) -> int:
    values = tensor.detach().contiguous()
    if values.device.type == "cpu":
        return zlib.crc32(values.view(torch.uint8).numpy().tobytes())
    # The position of each value matters, so that permuted masks differ.
    numbers = values.flatten().double().nan_to_num()
    factors = torch.arange(len(numbers), device=values.device).remainder(8191).double() + 1
    return hash(float((numbers * factors).sum()))
