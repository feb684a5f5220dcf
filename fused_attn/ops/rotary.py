"""Rotary position embedding: rotation of pairs of dimensions, forward and backward in one pass.

torch's operations need several passes over the tensor. As in ops/activation.py, the function is not
registered in torch.library: intercepted calls use torch's operations, which compilers can fuse.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend
from fused_attn.backends.fields import DTYPES
from fused_attn.backends.registry import default_with
from fused_attn.base.layout import kernel_strides
from fused_attn.base.torch_state import host_readable, needs_grad, plain_eager
from fused_attn.call.validation import check_floats, check_integers, check_same


class Rotation(NamedTuple):
    """The arguments of `rotary_embedding` except input.

    Attributes:
        positions: (batch, seqlen) int64, contiguous, or None.
        per_dimension: the tables have a factor for each rotated dimension, otherwise for each pair.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    interleaved: bool
    per_dimension: bool


def checked_rotation(
    input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> Rotation:
    """Validate the arguments of `rotary_embedding`."""
    check_floats({"input": input}, 4)
    check_floats({"cos": cos, "sin": sin})
    batch, _, seqlen, head_dim = input.shape
    check_same("cos", "device", cos.device, input.device, "input")
    check_same("sin", "device", sin.device, input.device, "input")
    shape = tuple(cos.shape)
    if cos.dim() not in (2, 3) or not (2 * shape[-1] <= head_dim or shape[-1] == head_dim):
        raise ValueError(
            f"cos must have shape (positions, width) or (batch, seqlen, width), with a width of at "
            f"most {head_dim // 2} (half of input's head_dim) or of {head_dim}, got {shape}"
        )
    if shape[-1] == head_dim and head_dim % 2:
        raise ValueError(
            f"input must have an even head_dim if cos has a width of head_dim, got {head_dim}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have shape {shape} (like cos), got {tuple(sin.shape)}")
    if positions is None:
        by_token = shape[:2] in ((batch, seqlen), (1, seqlen))
        if not (by_token if cos.dim() == 3 else shape[0] >= seqlen):
            expected = f"({seqlen} or more, width) or ({batch} or 1, {seqlen}, width)"
            raise ValueError(f"cos must have shape {expected} if positions is None, got {shape}")
    else:
        positions = _checked_positions(positions, cos, (batch, seqlen))
    return Rotation(cos, sin, positions, bool(interleaved), shape[-1] == head_dim)


def _checked_positions(positions: Tensor, cos: Tensor, shape: tuple[int, int]) -> Tensor:
    check_integers("positions", positions)
    check_same("positions", "device", positions.device, cos.device, "cos")
    if cos.dim() != 2:
        got = tuple(cos.shape)
        raise ValueError(
            f"cos must have shape (positions, width) if positions are given, got {got}"
        )
    if positions.shape not in (shape, (1, shape[1]), shape[1:]):
        got = tuple(positions.shape)
        raise ValueError(f"positions must have shape {shape} or ({shape[1]},), got {got}")
    if positions.numel() > 0 and host_readable(positions):
        least, most = (int(bound) for bound in positions.aminmax())
        if least < 0 or most >= cos.shape[0]:
            raise ValueError(
                f"positions must be in [0, {cos.shape[0] - 1}] (rows of cos), got [{least}, {most}]"
            )
    return positions.expand(shape).to(torch.int64).contiguous()


def rotate(input: Tensor, rotation: Rotation) -> Tensor:
    """Compute `rotary_embedding` of a checked call."""
    rotated = rotate_by_kernel(input, rotation)
    return rotate_by_torch(input, rotation) if rotated is None else rotated


def rotate_by_kernel(input: Tensor, rotation: Rotation) -> Tensor | None:
    """Compute `rotate`, or return None if no kernel supports the call."""
    backend = _backend_of(input, rotation)
    if backend is None:
        return None
    if needs_grad(input):
        if rotation.positions is not None:
            # Copy the checked values, so that the caller cannot change them before the backward.
            rotation = rotation._replace(positions=rotation.positions.clone())
        return _Rotary.apply(input, *rotation, backend, False)
    return _run(input, rotation, backend, False)


def rotate_by_torch(input: Tensor, rotation: Rotation, backward: bool = False) -> Tensor:
    """Compute `rotary_embedding` or its gradient in torch operations, rounding once."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    cos, sin, positions, interleaved, per_dimension = rotation
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    elif cos.dim() == 2:
        cos, sin = cos[: input.shape[2]], sin[: input.shape[2]]
    # (batch or 1, 1, seqlen, width)
    cos, sin = (table.to(dtype).unsqueeze(-3) for table in (cos, sin))
    rotary_dim = cos.shape[-1] if per_dimension else 2 * cos.shape[-1]

    def pairs(tensor: Tensor) -> tuple[Tensor, Tensor]:
        if interleaved:
            return tensor[..., ::2], tensor[..., 1::2]
        return tuple(tensor.split(rotary_dim // 2, -1)) if rotary_dim else (tensor, tensor)

    part, rest = input.split([rotary_dim, input.shape[-1] - rotary_dim], -1)
    first, second = pairs(part.to(dtype))
    (cos, cos_second), (sin, sin_second) = (
        pairs(table) if per_dimension else (table, table) for table in (cos, sin)
    )
    if backward:
        sin, sin_second = -sin_second, -sin
    turned = first * cos - second * sin, second * cos_second + first * sin_second
    part = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    part = part.to(input.dtype)
    return torch.cat([part, rest], -1) if rest.shape[-1] > 0 else part


def _backend_of(input: Tensor, rotation: Rotation) -> Backend | None:
    """Return the backend whose kernel computes a call, or None if torch's operations do."""
    cos, sin, positions, *_ = rotation
    if not plain_eager(input, cos, sin, positions) or needs_grad(cos, sin):
        return None
    if input.dtype not in DTYPES or input.numel() == 0 or cos.numel() == 0:
        return None
    return default_with("rotary", input.device)


def _run(input: Tensor, rotation: Rotation, backend: Backend, backward: bool) -> Tensor:
    cos, sin, positions, interleaved, per_dimension = rotation
    if cos.dtype != input.dtype or sin.dtype != input.dtype:
        dtype = torch.promote_types(input.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
    input, cos, sin = kernel_strides(input), kernel_strides(cos), kernel_strides(sin)
    return backend.rotary(input, cos, sin, positions, interleaved, per_dimension, backward)


class _Rotary(Function):
    """Autograd Function of `rotate`, which is linear in input. Its backward has the same form."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, *rest: Any) -> Tensor:
        *rotation, backend, backward = rest
        tensors, style = rotation[:3], rotation[3:]
        ctx.save_for_backward(*tensors)
        ctx.rest = style, backend, backward
        return _run(input, Rotation(*rotation), backend, backward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        style, backend, backward = ctx.rest
        rotation = Rotation(*ctx.saved_tensors, *style)
        if plain_eager(grad):
            result = _Rotary.apply(grad, *rotation, backend, not backward)
        else:
            result = rotate_by_torch(grad, rotation, not backward)
        return result, *(None,) * 7
