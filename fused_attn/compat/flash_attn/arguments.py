"""Conversion of flash-attn's arguments to those of this package."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.call.validation import check_integers
from fused_attn.masks import Mask

Window = tuple[int | None, int | None]

# Keywords of flash-attn 3 and 4 that affect speed but not results.
_HINTS = frozenset({"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"})
# Keywords that change results, which this package does not support. None, 0 and False mean unused.
_UNSUPPORTED = frozenset(
    {
        "qv", "q_v", "q_descale", "k_descale", "v_descale", "attention_chunk", "mask_mod",
        "score_mod", "aux_tensors", "block_sparse_tensors", "full_block_cnt", "full_block_idx",
        "mask_block_cnt", "mask_block_idx", "rotary_seqlens", "cu_seqlens_k_new", "cu_seqlens_q",
        "max_seqlen_q", "page_table", "return_lse",
    }
)  # fmt: skip


def mask_of(causal: bool, window_size: Window, alibi_slopes: Tensor | None = None) -> Mask | None:
    """Return the mask of flash-attn's arguments, aligned at the bottom right; None for no mask."""
    try:
        left, right = (-1 if size is None else index(size) for size in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be (left, right), got {window_size}") from None
    right = 0 if causal else right
    mask = None
    if left >= 0 or right >= 0:
        mask = masks.sliding_window(max(left, -1), max(right, -1), align="bottom_right")
    if alibi_slopes is None:
        return mask
    distances = masks.alibi(alibi_slopes, align="bottom_right")
    return distances if mask is None else mask & distances


def common_of(
    function: str,
    query: Tensor,
    softmax_scale: float | None,
    softcap: float,
    deterministic: bool,
    sinks: Tensor | None,
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """Return the keyword arguments that all functions of this package share.

    Raises:
        NotImplementedError: an argument is not supported.
        TypeError: flash-attn has no such keyword.
    """
    for name, value in keywords.items():
        if name in _UNSUPPORTED:
            if value is not None and value is not False and not (type(value) is int and value == 0):
                raise NotImplementedError(f"{function} of fused_attn does not support {name}")
        elif name not in _HINTS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    if deterministic and not query.is_cpu and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            "deterministic=True requires torch.use_deterministic_algorithms(True) on GPUs: without "
            "it, the backward of some kernels is not deterministic"
        )
    return {
        "scale": softmax_scale,
        "softcap": softcap or None,
        "sinks": sinks,
    }


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless all are (batch, seqlen, num_heads, head_dim) and fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have shape (batch, seqlen, num_heads, head_dim), with the same batch "
                f"in q, k and v, got {tuple(tensor.shape)}"
            )
    if k.shape[2] and q.shape[2] % k.shape[2]:
        raise ValueError(f"num_heads of q must be a multiple of {k.shape[2]}, got {q.shape[2]}")


def check_per_sequence(name: str, values: Tensor, q: Tensor) -> None:
    """Raise ValueError or TypeError unless values are (batch,) integers on the device of q."""
    check_integers(name, values, q)
    if values.shape != q.shape[:1]:
        raise ValueError(f"{name} must have shape ({len(q)},), got {tuple(values.shape)}")


def check_probs(return_attn_probs: bool, dropout_p: float) -> None:
    """Raise NotImplementedError if the weights after dropout are requested."""
    if return_attn_probs and dropout_p > 0.0:
        raise NotImplementedError("return_attn_probs is not supported with dropout_p > 0")
