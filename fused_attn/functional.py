"""The public functions: validation, defaults, and the way to a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.backends import first_backend, problem_of, select
from fused_attn.base.autocast import any_autocast, autocast, autocast_norm
from fused_attn.base.shapes import canonical
from fused_attn.base.torch_state import learns, statistics_dtype, unwatched
from fused_attn.call.calls import AttentionCall, NormCall
from fused_attn.call.validation import (
    attention_call,
    check_float,
    check_norm,
    check_qkv,
    checked_probability,
    checked_seed,
)
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec
from fused_attn.ops import autograd
from fused_attn.ops.second_order import give_second_order


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Fused masked attention: softmax(scale * query @ key^T + mask) @ value, never held whole.

    Takes the place of `torch.nn.functional.scaled_dot_product_attention`. Masked tiles are
    skipped, rows with no visible key give 0 (never NaN), and what stands in keys and values that
    no query may see does not matter. Differentiable in query, key, value, a float mask and lse,
    to any order.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16, float64. Also
            (seqlen_q, head_dim), (batch, seqlen_q, head_dim) and extra leading batch dimensions.
        key: (batch, num_heads_kv, seqlen_k, head_dim). Batch and heads broadcast as in torch.
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask: a bool tensor (True = attend) or a float tensor (added to the scores; -inf
            masks), broadcastable to (batch, num_heads, seqlen_q, seqlen_k), or a
            `fused_attn.masks.Mask`.
        dropout_p: probability in [0, 1], in steps of 2^-16, of dropping a weight. It always
            applies: pass 0.0 in evaluation.
        is_causal: query i sees keys j <= i (top-left); combines with attn_mask.
        scale: multiplies query @ key^T; None is 1 / sqrt(head_dim).
        enable_gqa: num_heads may be a multiple of num_heads_kv; nothing is expanded.
        softcap: scores become softcap * tanh(scores / softcap) before the mask is added.
        seed: what decides which weights are dropped: an int of 64 bits, or an int64 scalar tensor
            on query's device, which may not change before the backward. The same seed drops the
            same positions, so layers and steps need seeds of their own. None draws one from torch's
            generator. Not for backend "sdpa".
        return_lse: also return the natural log of the softmax denominator.
        backend: "cpp", "cuda", "triton", "sdpa" or "eager" instead of the automatic choice.

    Returns:
        out with query's leading shape and head_dim_v, laid out in memory as query is, as in torch;
        with return_lse also lse, (batch, num_heads, seqlen_q), float32 (float64 for float64), -inf
        for rows with no visible key.

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.
        NotImplementedError: the backend that was asked for does not take the problem.

    Example:
        >>> query = torch.randn(2, 8, 128, 64)
        >>> key, value = torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64)
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.padding([128, 100])
        >>> out, lse = fused_attn.scaled_dot_product_attention(
        ...     query, key, value, mask, enable_gqa=True, return_lse=True
        ... )
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Milakov and Gimelshein
        2018, "Online normalizer calculation for softmax"; Dao 2023, "FlashAttention-2".
    """
    plain = softcap is None and seed is None and backend is None and not return_lse
    if plain and unwatched():
        out = _at_once(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_float(name, tensor)
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    mask_tensor = attn_mask if isinstance(attn_mask, Tensor) else None
    q, k, v, mask_tensor, leading = canonical(query, key, value, mask_tensor, enable_gqa)
    mask = masks.as_mask(attn_mask if mask_tensor is None else mask_tensor, is_causal)
    result = "lse" if return_lse else "out"
    out, lse = attend(q, k, v, mask, scale, softcap, dropout_p, seed, result, backend)
    out = out if len(leading) == 3 else out.reshape(*leading, out.shape[-1])
    return (out, lse.reshape(leading)) if return_lse else out


def _at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """out by a backend that does all in one, or None: small calls spend their time on the way."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    if type(is_causal) is not bool or type(scale) not in SCALES:
        return None
    backend = first_backend(query.device)
    if backend is None:
        return None
    if any_autocast():
        query, key, value = autocast(query, key, value)
    call_of = (query, key, value, attn_mask, dropout_p, is_causal, scale, bool(enable_gqa))
    if backend.trains_at_once and any(learns(t) for t in (query, key, value)):
        if type(dropout_p) not in (float, int) or not 0.0 <= dropout_p < 1.0:
            return None
        return autograd.attention_at_once(backend, *call_of)
    out = backend.attention_at_once(*call_of)
    if out is not None and out.requires_grad and dropout_p == 0.0:

        def call() -> AttentionCall:
            mask = masks.as_mask(attn_mask, is_causal)
            return attention_call(query, key, value, mask, scale, None, 0.0)

        tensors = [query, key, value]
        if attn_mask is not None:
            tensors += [attn_mask] if isinstance(attn_mask, Tensor) else attn_mask.tensors()
        give_second_order(out, tensors, call)
    return out


# Types of a scale that the short way takes.
SCALES = frozenset({type(None), float, int})


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | MaskSpec | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    result: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of tensors in their canonical form."""
    call = attention_call(query, key, value, mask, scale, softcap, dropout_p, seed)
    return autograd.attention(call, select(problem_of(call, result), backend), result == "lse")


_MAX_DIMS = 8  # of the tensors that csrc/tensors.h reads


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of residual + dropout(input), in one pass over memory.

    Takes the place of `torch.nn.functional.layer_norm`. Differentiable in input, residual, weight
    and bias, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16, float64. Views whose
            rows are contiguous are read in place: see docs/masks.md.
        normalized_shape: the trailing dimensions that are normalised together.
        weight, bias: (*normalized_shape), of any of these types; None leaves them out.
        eps: added to the variance.
        residual: like input; added before the norm.
        dropout_p: probability in [0, 1], in steps of 2^-16, of dropping an element of input before
            the sum.
        seed: as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager" instead of the automatic choice.

    Returns:
        out, like input; with return_residual also the sum (input itself where nothing is added).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.

    Example:
        >>> sublayer, x = torch.randn(2, 128, 512), torch.randn(2, 128, 512)
        >>> weight, bias = torch.ones(512), torch.zeros(512)
        >>> out, x = fused_attn.layer_norm(
        ...     sublayer, 512, weight, bias, residual=x, dropout_p=0.1, return_residual=True
        ... )
        >>> out.shape, x.shape
        (torch.Size([2, 128, 512]), torch.Size([2, 128, 512]))

    Source: Ba et al. 2016, "Layer Normalization", equation 4.
    """
    return _norm(
        input, normalized_shape, weight, bias, eps, False, residual, dropout_p, seed,
        return_residual, backend,
    )  # fmt: skip


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of residual + dropout(input), in one pass over memory.

    Takes the place of `torch.nn.functional.rms_norm`. Differentiable in input, residual and
    weight, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16, float64. Views whose
            rows are contiguous are read in place: see docs/masks.md.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: (*normalized_shape), of any of these types; None leaves it out.
        eps: added to the mean square; None is that of float32 (float64 for float64), as in
            torch.
        residual: like input; added before the norm.
        dropout_p: probability in [0, 1], in steps of 2^-16, of dropping an element of input before
            the sum.
        seed: as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager" instead of the automatic choice.

    Returns:
        out, like input; with return_residual also the sum (input itself where nothing is added).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.

    Example:
        >>> x = torch.randn(2, 128, 512, dtype=torch.bfloat16)
        >>> fused_attn.rms_norm(x, 512, torch.ones(512), eps=1e-6).dtype
        torch.bfloat16

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    return _norm(
        input, normalized_shape, weight, None, eps, True, residual, dropout_p, seed,
        return_residual, backend,
    )  # fmt: skip


def _norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    rms: bool,
    residual: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    return_residual: bool,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    plain = seed is None and backend is None and type(dropout_p) in (float, int)
    if plain and 0.0 <= dropout_p < 1.0 and isinstance(input, Tensor) and unwatched():
        call_of = (input, shape, weight, bias, eps, rms, residual, dropout_p, return_residual)
        at_once = _norm_at_once(*call_of)
        if at_once is not None:
            return at_once
    check_norm(input, shape, weight, bias, residual)
    dropout_p = checked_probability(dropout_p)
    input, residual = autocast_norm(input, residual)
    eps = _default_eps(input) if eps is None else eps
    columns = math.prod(shape)
    matrix: Sequence[int] = input.shape
    if len(shape) > 1 or len(matrix) > _MAX_DIMS:
        leading = matrix[: -len(shape)]
        matrix = (*(leading if len(leading) < _MAX_DIMS else (math.prod(leading),)), columns)
    call = NormCall(
        _reshaped(input, matrix),
        None if residual is None else _reshaped(residual, matrix),
        None if weight is None else _reshaped(weight, (columns,)),
        None if bias is None else _reshaped(bias, (columns,)),
        eps,
        rms,
        dropout_p,
        checked_seed(seed, dropout_p, input.device),
    )
    out, total = autograd.norm(call, select(problem_of(call), backend))
    out = _reshaped(out, input.shape)
    return (out, _reshaped(total, input.shape)) if return_residual else out


def _norm_at_once(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    rms: bool,
    residual: Tensor | None,
    dropout_p: float,
    return_residual: bool,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """The norm by a backend that does all in one, or None."""
    first = first_backend(input.device)
    eps = _default_eps(input) if eps is None else eps
    trains = first is not None and first.trains_at_once
    trains = trains and any(learns(t) for t in (input, residual, weight, bias))
    if first is None or type(eps) is not float or (dropout_p > 0.0 and not trains):
        return None
    if any_autocast():
        check_norm(input, shape, weight, bias, residual)
        input, residual = autocast_norm(input, residual)
    if not trains:
        return first.norm_at_once(input, shape, weight, bias, residual, eps, rms, return_residual)
    if len(shape) > 1 or input.is_nested or input.dim() > _MAX_DIMS:
        return None
    if shape != input.shape[-1:]:
        return None
    call_of = (input, residual, weight, bias, eps, rms, dropout_p, return_residual)
    return autograd.norm_at_once(first, *call_of)


def _default_eps(input: Tensor) -> float:
    return torch.finfo(statistics_dtype(input.dtype)).eps


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    tensor = tensor.resolve_neg()
    return tensor if tensor.shape == shape else tensor.reshape(shape)
