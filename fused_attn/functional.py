"""The public functions: validation, defaults, and the way to a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fused_attn import _calls, autograd, masks, ops, philox
from fused_attn._modes import statistics_dtype, transformed
from fused_attn._packing import check_cu_seqlens
from fused_attn._shapes import canonical
from fused_attn.backends import AttentionProblem, NormProblem, reference, select
from fused_attn.mask_spec import MaskSpec, normalize
from fused_attn.masks import Mask


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
        dropout_p: probability in [0, 1] of dropping a weight. It always applies: pass 0.0 in
            evaluation.
        is_causal: query i sees keys j <= i (top-left); combines with attn_mask.
        scale: multiplies query @ key^T; None is 1 / sqrt(head_dim).
        enable_gqa: num_heads may be a multiple of num_heads_kv; nothing is expanded.
        softcap: scores become softcap * tanh(scores / softcap) before the mask is added.
        return_lse: also return the natural log of the softmax denominator.
        backend: "cpp" or "eager" instead of the automatic choice.

    Returns:
        out with query's leading shape and head_dim_v; with return_lse also lse, (batch, num_heads,
        seqlen_q), float32 (float64 for float64), -inf for rows with no visible key.

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.
        NotImplementedError: the backend that was asked for does not take the problem.

    Example:
        >>> mask = masks.causal() & masks.padding(lengths)
        >>> out = scaled_dot_product_attention(query, key, value, mask)

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Milakov and Gimelshein
        2018, "Online normalizer calculation for softmax"; Dao 2023, "FlashAttention-2".
    """
    signature = None
    if attn_mask is None and dropout_p == 0.0 and not return_lse and backend is None:
        signature = _calls.signature(
            (query, key, value),
            "attention",
            is_causal,
            scale,
            enable_gqa,
            softcap,
            type(dropout_p),
        )
        plan = _calls.find(signature)
        if plan is not None:
            return plan(query, key, value)
    given = (query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_float(name, tensor)
    query, key, value = ops.autocast(query, key, value)
    _check_qkv(query, key, value)
    dropout_p = _checked_probability(dropout_p)
    softcap = _checked_softcap(softcap)
    mask_tensor = attn_mask if isinstance(attn_mask, Tensor) else None
    q, k, v, mask_tensor, leading = canonical(query, key, value, mask_tensor, enable_gqa)
    attn_mask = attn_mask if mask_tensor is None else mask_tensor
    batch, num_heads, seqlen_q, _ = q.shape
    scale = _checked_scale(scale, q.shape[3])
    _check_length(max(seqlen_q, k.shape[2]))
    mask = masks.as_mask(attn_mask, is_causal)
    spec = normalize(mask, batch, num_heads, seqlen_q, k.shape[2], q)
    name = _select_attention(q, v, spec, backend)
    out, lse = _attention(q, k, v, spec, scale, softcap, dropout_p, name)
    if name == "cpp" and all(a is b for a, b in zip(given, (q, k, v), strict=True)):
        _calls.keep(signature, _calls.attention_plan, q, k, v, spec, scale, softcap)
    if len(leading) != 3:
        out, lse = out.reshape(*leading, out.shape[-1]), lse.reshape(leading)
    return (out, lse) if return_lse else out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that lie one after the other, without padding.

    The results are those of `scaled_dot_product_attention` on the padded batch, dropout included,
    and so is what is differentiable.

    Args:
        query: (total_q, num_heads, head_dim); float32, float16, bfloat16, float64.
        key: (total_k, num_heads_kv, head_dim); num_heads may be a multiple of num_heads_kv.
        value: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,) int32 or int64; sequence b is the rows [cu_seqlens_q[b],
            cu_seqlens_q[b + 1]), so it starts with 0 and ends with total_q.
        cu_seqlens_k: the same for key and value, and total_k.
        max_seqlen_q, max_seqlen_k: rows of the longest sequence, or more.
        attn_mask: as in scaled_dot_product_attention, of each sequence by itself: broadcastable to
            (batch, num_heads, max_seqlen_q, max_seqlen_k), or a `fused_attn.masks.Mask`.
        is_causal: query i of a sequence sees its keys j <= i (top-left; for bottom-right, as in
            decoding with a cache, pass masks.causal(align="bottom_right")).
        dropout_p, scale, softcap, backend: as in scaled_dot_product_attention.
        return_lse: also return the natural log of the softmax denominator.

    Returns:
        out (total_q, num_heads, head_dim_v); with return_lse also lse, (num_heads, total_q),
        float32 (float64 for float64).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got. Values of
            cu_seqlens are looked at on the CPU only.
        NotImplementedError: the backend that was asked for does not take the problem.

    Source: Dao 2023, "FlashAttention-2", section 3.2, for the layout.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_float(name, tensor)
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions, got {tuple(tensor.shape)}")
    query, key, value = ops.autocast(query, key, value)
    _check_qkv(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    num_heads, num_heads_kv = query.shape[1], key.shape[1]
    _check_same("value", "num_heads_kv", value.shape[1], num_heads_kv, "key")
    if num_heads and (num_heads_kv == 0 or num_heads % num_heads_kv):
        raise ValueError(
            f"key must have num_heads_kv that divides num_heads {num_heads} (of query), "
            f"got {num_heads_kv}"
        )
    dropout_p = _checked_probability(dropout_p)
    softcap = _checked_softcap(softcap)
    scale = _checked_scale(scale, query.shape[2])
    _check_length(max(max_seqlen_q, max_seqlen_k))
    cu_seqlens_q = _checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, query)
    cu_seqlens_k = _checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, key)
    _check_same("cu_seqlens_k", "shape", cu_seqlens_k.shape, cu_seqlens_q.shape, "cu_seqlens_q")
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    own = masks.padding(cu_seqlens_k.diff(), cu_seqlens_q.diff())
    mask = masks.as_mask(attn_mask, is_causal)
    spec = replace(
        normalize(
            own if mask is None else mask & own,
            cu_seqlens_q.shape[0] - 1, num_heads, max_seqlen_q, max_seqlen_k, q,
        ),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    name = _select_attention(q, v, spec, backend)
    out, lse = _attention(q, k, v, spec, scale, softcap, dropout_p, name)
    out, lse = out[0].transpose(0, 1), lse[0]
    return (out, lse) if return_lse else out


def _select_attention(query: Tensor, value: Tensor, spec: MaskSpec, backend: str | None) -> str:
    """The backend for a problem in its canonical form."""
    if spec.bias is not None and spec.bias.dtype == torch.float64 != query.dtype:
        raise ValueError(
            f"attn_mask must be bool, float32 or {query.dtype} (as query), got float64"
        )
    problem = AttentionProblem(
        query.device,
        query.dtype,
        query.shape[3],
        value.shape[3],
        None if spec.bias is None else spec.bias.dtype,
        transformed(),
    )
    return select(problem, backend)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    name: str,
) -> tuple[Tensor, Tensor]:
    """out and lse by backend `name`, with a new seed."""
    seed = philox.new_seed(query.device) if dropout_p > 0.0 else None
    args = (query, key, value, spec, scale, softcap, dropout_p, seed)
    return reference.attention(*args) if name == "eager" else autograd.attention(*args, name)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of residual + dropout(input), in one pass over memory.

    Takes the place of `torch.nn.functional.layer_norm`. Differentiable in input, residual, weight
    and bias, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16, float64.
        normalized_shape: the trailing dimensions that are normalised together.
        weight, bias: (*normalized_shape), of any of these types; None leaves them out.
        eps: added to the variance.
        residual: like input; added before the norm.
        dropout_p: probability in [0, 1] of dropping an element of input before the sum.
        return_residual: also return residual + dropout(input).
        backend: "cpp" or "eager" instead of the automatic choice.

    Returns:
        out, like input; with return_residual also the sum (input itself where nothing is added).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.

    Source: Ba et al. 2016, "Layer Normalization", equation 4.
    """
    return _norm(
        input, normalized_shape, weight, bias, eps, False, residual, dropout_p, return_residual,
        backend,
    )  # fmt: skip


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of residual + dropout(input), in one pass over memory.

    Takes the place of `torch.nn.functional.rms_norm`. Differentiable in input, residual and
    weight, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16, float64.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: (*normalized_shape), of any of these types; None leaves it out.
        eps: added to the mean square; None is that of float32 (float64 for float64), as in
            torch.
        residual: like input; added before the norm.
        dropout_p: probability in [0, 1] of dropping an element of input before the sum.
        return_residual: also return residual + dropout(input).
        backend: "cpp" or "eager" instead of the automatic choice.

    Returns:
        out, like input; with return_residual also the sum.

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    return _norm(
        input, normalized_shape, weight, None, eps, True, residual, dropout_p, return_residual,
        backend,
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
    return_residual: bool,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = tuple(normalized_shape)
    signature = None
    if residual is None and dropout_p == 0.0 and not return_residual and backend is None:
        signature = _calls.signature(
            (input, weight, bias), "norm", shape, eps, rms, type(dropout_p)
        )
        plan = _calls.find(signature)
        if plan is not None:
            return plan(input, weight, bias)
    _check_float("input", input)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(f"input must end in normalized_shape {shape}, got {tuple(input.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        _check_float(name, parameter)
        if tuple(parameter.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} (normalized_shape), got {tuple(parameter.shape)}"
            )
        _check_same(name, "device", parameter.device, input.device, "input")
    if residual is not None:
        _check_float("residual", residual)
        if residual.shape != input.shape:
            raise ValueError(
                f"residual must have shape {tuple(input.shape)} (as input), "
                f"got {tuple(residual.shape)}"
            )
        _check_same("residual", "dtype", residual.dtype, input.dtype, "input")
        _check_same("residual", "device", residual.device, input.device, "input")
    dropout_p = _checked_probability(dropout_p)
    input, residual = ops.autocast_norm(input, residual)
    if eps is None:
        eps = torch.finfo(statistics_dtype(input.dtype)).eps
    num_columns = math.prod(shape)
    num_rows = input.numel() // num_columns if num_columns else 0
    rows = input.resolve_neg().reshape(num_rows, num_columns)
    residual_rows = None if residual is None else residual.resolve_neg().reshape(rows.shape)
    flat_weight = None if weight is None else weight.resolve_neg().reshape(num_columns)
    flat_bias = None if bias is None else bias.resolve_neg().reshape(num_columns)
    name = select(NormProblem(input.device, input.dtype, num_columns, transformed()), backend)
    seed = philox.new_seed(input.device) if dropout_p > 0.0 else None
    run = reference.norm if name == "eager" else autograd.norm
    tail = () if name == "eager" else (name,)
    out, total = run(rows, residual_rows, flat_weight, flat_bias, eps, rms, dropout_p, seed, *tail)
    out = out.reshape(input.shape)
    if name == "cpp" and rows.numel() > 0:
        _calls.keep(signature, _calls.norm_plan, input, weight, bias, num_columns, eps, rms)
    return (out, total.reshape(input.shape)) if return_residual else out


# ---- validation ---------------------------------------------------------------------------------

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _check_float(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not nested or sparse: pad it")
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")


def _check_same(name: str, what: str, got: object, expected: object, of: str) -> None:
    if got != expected:
        raise ValueError(f"{name} must have {what} {expected} (as {of}), got {got}")


def _check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got {tuple(tensor.shape)}")
        if tensor is not query:
            _check_same(name, "dtype", tensor.dtype, query.dtype, "query")
            _check_same(name, "device", tensor.device, query.device, "query")
    _check_same("key", "head_dim", key.shape[-1], query.shape[-1], "query")
    _check_same("value", "seqlen_k", value.shape[-2], key.shape[-2], "key")


def _checked_probability(dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a float, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    return float(dropout_p)


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, (Tensor, str)):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}")
    return scale


def _check_length(seqlen: int) -> None:
    if seqlen >= masks.UNLIMITED:
        raise ValueError(f"query and key must be shorter than {masks.UNLIMITED}")


def _checked_cu_seqlens(name: str, cu_seqlens: Tensor, max_seqlen: int, rows: Tensor) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
    _check_same(name, "device", cu_seqlens.device, rows.device, "query")
    check_cu_seqlens(name, cu_seqlens, max_seqlen, rows.shape[0])
    return cu_seqlens.to(torch.int64)


def _checked_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if not softcap > 0.0 or math.isinf(softcap):
        raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
    return float(softcap)
