"""Validation of the arguments of the public functions.

Each error message names the argument, and states the expected and the actual value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.autocast import autocast, autocast_norm
from fused_attn.base.shapes import canonical
from fused_attn.base.torch_state import FLOATS, is_compiling, is_intercepted
from fused_attn.call.attention import AttentionCall, AttentionOptions, UncheckedAttention
from fused_attn.call.norm import NormCall, UncheckedNorm
from fused_attn.masks import UNLIMITED, Mask, as_mask
from fused_attn.masks.spec import MaskSpec, spec_of, spec_of_mask
from fused_attn.masks.tensors import known_mask


def check_floats(tensors: Mapping[str, object], ndim: int | None = None) -> None:
    """Raise TypeError or ValueError unless all are dense float tensors, with `ndim` dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested or sparse tensor: pad it or call "
                "to_dense()"
            )
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}"
            )
        if ndim is not None and tensor.dim() != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(tensor.shape)}")


def check_integers(name: str, tensor: object, query: Tensor | None = None) -> None:
    """Raise TypeError or ValueError unless a tensor is an integer tensor on query's device."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        got = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
    if query is not None:
        check_same(name, "device", tensor.device, query.device, "query")


def check_same(name: str, what: str, got: object, expected: object, of: str) -> None:
    if got != expected:
        raise ValueError(f"{name} must have {what} {expected} (like {of}), got {got}")


def check_like_query(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all tensors have the dtype and device of the one named "query"."""
    dtype, device = tensors["query"].dtype, tensors["query"].device
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.device != device:
            check_same(name, "dtype", tensor.dtype, dtype, "query")
            check_same(name, "device", tensor.device, device, "query")


def check_heads(name: str, query: Tensor, key: Tensor) -> None:
    """Raise ValueError unless the number of heads of `name` divides that of query."""
    num_heads, num_heads_kv = query.shape[1], key.shape[1]
    if num_heads and (num_heads_kv == 0 or num_heads % num_heads_kv):
        raise ValueError(
            f"num_heads_kv of {name} must divide num_heads of query, {num_heads}, "
            f"got {num_heads_kv}"
        )


def check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}"
            )
    check_like_query(tensors)
    check_same("key", "head_dim", key.shape[-1], query.shape[-1], "query")
    check_same("value", "seqlen_k", value.shape[-2], key.shape[-2], "key")


def check_length(*seqlens: int) -> None:
    """Raise ValueError if a sequence length is not below UNLIMITED.

    Under torch.compile the check is skipped, and the ops check lengths at run time. A comparison of
    symbolic lengths would add a guard, and programs from torch.export would reject longer
    sequences.
    """
    if is_compiling():
        return
    for seqlen in seqlens:
        if isinstance(seqlen, int) and seqlen >= UNLIMITED:
            raise ValueError(f"query and key must have a seqlen below {UNLIMITED}, got {seqlen}")


def check_norm(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    check_floats({"input": input})
    if not shape:
        raise ValueError("normalized_shape must have at least one dimension, got ()")
    if tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"input must have a shape that ends with normalized_shape {shape}, "
            f"got shape {tuple(input.shape)}"
        )
    if not isinstance(math.prod(shape), (int, Integral, torch.SymInt)):
        raise TypeError(f"normalized_shape must contain only ints, got {shape}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check_floats({name: parameter})
        if tuple(parameter.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} (normalized_shape), got {tuple(parameter.shape)}"
            )
        check_same(name, "device", parameter.device, input.device, "input")
    if residual is not None:
        check_floats({"residual": residual})
        if residual.shape != input.shape:
            raise ValueError(
                f"residual must have shape {tuple(input.shape)} (like input), "
                f"got {tuple(residual.shape)}"
            )
        check_same("residual", "dtype", residual.dtype, input.dtype, "input")
        check_same("residual", "device", residual.device, input.device, "input")


def checked_attention(
    call: UncheckedAttention,
) -> tuple[AttentionCall, tuple[int, ...] | None]:
    """Validate an unchecked attention call and convert it to an AttentionCall.

    Returns:
        The AttentionCall, and the leading dimensions of the results: out has shape (*leading,
        head_dim_v), and lse has shape leading. For packed sequences, which become one batch,
        leading is None.
    """
    check_floats({"query": call.query, "key": call.key, "value": call.value})
    query, key, value = autocast(call.query, call.key, call.value)
    mask: Any = call.attn_mask
    if call.is_packed:
        query, key, value = _packed_qkv(query, key, value)
        return attention_call(query, key, value, mask, call.options), None
    check_qkv(query, key, value)
    mask = known_mask(mask, (query.shape[-2], key.shape[-2]))
    tensor = mask if isinstance(mask, Tensor) else None
    q, k, v, tensor, leading = canonical(query, key, value, tensor, call.enable_gqa)
    mask = mask if tensor is None else tensor
    if mask is None and not is_intercepted():
        mask = spec_of(None, call.is_causal, q, k)
    elif not isinstance(mask, MaskSpec):
        mask = as_mask(mask, call.is_causal)
    return attention_call(q, k, v, mask, call.options), leading


def _packed_qkv(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Validate packed tensors (total, heads, dim) and return views (1, heads, total, dim)."""
    check_qkv(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    check_same("value", "num_heads_kv", value.shape[1], key.shape[1], "key")
    check_heads("key", query, key)
    return [t.transpose(0, 1)[None] for t in (query, key, value)]


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | MaskSpec | None,
    options: AttentionOptions,
) -> AttentionCall:
    """Build the validated call for 4-D tensors, validating its options and mask.

    Args:
        query, key, value: valid 4-D tensors (see `base.shapes.canonical`).
        mask: a Mask, a MaskSpec for exactly this call, or None.
        options: unvalidated options.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    options = options.checked(head_dim, query.device)
    check_length(seqlen_q, key.shape[2])
    if not isinstance(mask, MaskSpec):
        mask = spec_of_mask(mask, batch, num_heads, seqlen_q, key.shape[2], query.device)
    if mask.bias is not None and mask.bias.dtype == torch.float64 != query.dtype:
        raise ValueError(
            f"attn_mask must not be float64 if query is {query.dtype}; pass attn_mask.float()"
        )
    return AttentionCall(query, key, value, mask, options)


_MAX_DIMS = 8  # maximum number of dimensions that csrc/tensors.h supports


def checked_norm(call: UncheckedNorm) -> NormCall:
    """Validate an unchecked norm call and convert it to a NormCall.

    The normalized dimensions are merged into one. Leading dimensions are merged if there are more
    than kernels support.
    """
    shape = call.normalized_shape
    if torch.jit.is_tracing():  # sizes of tensors are then tensors
        shape = tuple([int(size) for size in shape])
    check_norm(call.input, shape, call.weight, call.bias, call.residual)
    input, residual = autocast_norm(call.input, call.residual)
    columns = math.prod(shape)
    matrix: Sequence[int] = input.shape
    if len(shape) > 1 or len(matrix) > _MAX_DIMS:
        leading = matrix[: -len(shape)]
        matrix = (*(leading if len(leading) < _MAX_DIMS else (math.prod(leading),)), columns)
    return NormCall(
        _reshaped(input, matrix),
        None if residual is None else _reshaped(residual, matrix),
        None if call.weight is None else _reshaped(call.weight, (columns,)),
        None if call.bias is None else _reshaped(call.bias, (columns,)),
        call.options.checked(input.dtype, input.device),
    )


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    tensor = tensor.resolve_neg()
    return tensor if tensor.shape == shape else tensor.reshape(shape)
