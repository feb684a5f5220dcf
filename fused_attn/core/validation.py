"""Checks of arguments: every error names the argument, what was expected and what came."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from fused_attn.core import philox
from fused_attn.core.call import AttentionCall
from fused_attn.core.packed import check_cu_seqlens
from fused_attn.masks import UNLIMITED, Mask
from fused_attn.masks.spec import MaskSpec, normalize

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_float(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not nested or sparse: pad it")
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")


def check_same(name: str, what: str, got: object, expected: object, of: str) -> None:
    if got != expected:
        raise ValueError(f"{name} must have {what} {expected} (as {of}), got {got}")


def check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got {tuple(tensor.shape)}")
        if tensor is not query:
            check_same(name, "dtype", tensor.dtype, query.dtype, "query")
            check_same(name, "device", tensor.device, query.device, "query")
    check_same("key", "head_dim", key.shape[-1], query.shape[-1], "query")
    check_same("value", "seqlen_k", value.shape[-2], key.shape[-2], "key")


def checked_probability(dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a float, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    return float(dropout_p)


def checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if not isinstance(scale, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}")
    return scale


def check_max_seqlen(name: str, seqlen: int) -> None:
    if isinstance(seqlen, bool) or not isinstance(seqlen, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(seqlen).__name__}")
    if seqlen < 0:
        raise ValueError(f"{name} must be >= 0, got {seqlen}")
    check_length(seqlen)


def check_length(seqlen: int) -> None:
    if seqlen >= UNLIMITED:
        raise ValueError(f"query and key must be shorter than {UNLIMITED}")


def checked_cu_seqlens(name: str, cu_seqlens: Tensor, max_seqlen: int, rows: Tensor) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
    check_same(name, "device", cu_seqlens.device, rows.device, "query")
    check_cu_seqlens(name, cu_seqlens, max_seqlen, rows.shape[0])
    return cu_seqlens.to(torch.int64).contiguous()


def checked_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if not isinstance(softcap, Real):
        raise TypeError(f"softcap must be a float, got {type(softcap).__name__}")
    if not softcap > 0.0 or math.isinf(softcap):
        raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
    return float(softcap)


def check_norm(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    check_float("input", input)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(f"input must end in normalized_shape {shape}, got {tuple(input.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check_float(name, parameter)
        if tuple(parameter.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} (normalized_shape), got {tuple(parameter.shape)}"
            )
        check_same(name, "device", parameter.device, input.device, "input")
    if residual is not None:
        check_float("residual", residual)
        if residual.shape != input.shape:
            raise ValueError(
                f"residual must have shape {tuple(input.shape)} (as input), "
                f"got {tuple(residual.shape)}"
            )
        check_same("residual", "dtype", residual.dtype, input.dtype, "input")
        check_same("residual", "device", residual.device, input.device, "input")


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | MaskSpec | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
) -> AttentionCall:
    """The call of tensors in their canonical form, with a new seed where it drops.

    Raises:
        ValueError, TypeError: an option is wrong, or the mask does not fit.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    dropout_p, softcap = checked_probability(dropout_p), checked_softcap(softcap)
    scale = checked_scale(scale, head_dim)
    check_length(max(seqlen_q, key.shape[2]))
    if not isinstance(mask, MaskSpec):
        mask = normalize(mask, batch, num_heads, seqlen_q, key.shape[2], query)
    if mask.bias is not None and mask.bias.dtype == torch.float64 != query.dtype:
        raise ValueError(
            f"attn_mask must be bool, float32 or {query.dtype} (as query), got float64"
        )
    seed = philox.new_seed(query.device) if dropout_p > 0.0 else None
    return AttentionCall(query, key, value, mask, scale, softcap, dropout_p, seed)
