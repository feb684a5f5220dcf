"""The public functions: validation, defaults, and the way to a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.backends import AttentionProblem, NormProblem, cpp, cuda, reference, select
from fused_attn.core import autograd, ops, packed, philox
from fused_attn.core import plans as _calls
from fused_attn.core.layout import readable_in_place
from fused_attn.core.shapes import canonical
from fused_attn.core.torch_state import statistics_dtype, transformed
from fused_attn.core.validation import (
    check_float,
    check_length,
    check_max_seqlen,
    check_qkv,
    check_same,
    checked_cu_seqlens,
    checked_probability,
    checked_scale,
    checked_softcap,
)
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, normalize, remake


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
        backend: "cpp", "cuda", "triton" or "eager" instead of the automatic choice.

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
    own_mask = attn_mask if isinstance(attn_mask, Mask) else None
    mask_tensor = attn_mask if isinstance(attn_mask, Tensor) else None
    signature = None
    learnt = mask_tensor is not None and mask_tensor.requires_grad and torch.is_grad_enabled()
    if not learnt and (mask_tensor is attn_mask or own_mask is attn_mask):
        signature = _calls.signature(
            (query, key, value, mask_tensor),
            backend,
            "attention",
            dropout_p,
            type(dropout_p),
            is_causal,
            scale,
            enable_gqa,
            softcap,
            return_lse,
        )
        plan = _calls.find(signature, own_mask)
        if plan is not None:
            return plan(query, key, value, mask_tensor)
    given = (query, key, value, mask_tensor)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_float(name, tensor)
    query, key, value = ops.autocast(query, key, value)
    check_qkv(query, key, value)
    dropout_p = checked_probability(dropout_p)
    softcap = checked_softcap(softcap)
    q, k, v, mask_tensor, leading = canonical(query, key, value, mask_tensor, enable_gqa)
    attn_mask = attn_mask if mask_tensor is None else mask_tensor
    batch, num_heads, seqlen_q, _ = q.shape
    scale = checked_scale(scale, q.shape[3])
    check_length(max(seqlen_q, k.shape[2]))
    mask = masks.as_mask(attn_mask, is_causal)
    spec = normalize(mask, batch, num_heads, seqlen_q, k.shape[2], q)
    name = _select_attention(q, v, spec, backend)
    out, lse = _attention(q, k, v, spec, scale, softcap, dropout_p, name)
    if name != "eager" and all(a is b for a, b in zip(given, (q, k, v, mask_tensor), strict=True)):
        options = (spec, scale, softcap, dropout_p, return_lse, name)
        _calls.keep(signature, own_mask, _attention_plan, signature, *given, *options)
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
        check_float(name, tensor)
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions, got {tuple(tensor.shape)}")
    query, key, value = ops.autocast(query, key, value)
    check_qkv(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    num_heads, num_heads_kv = query.shape[1], key.shape[1]
    check_same("value", "num_heads_kv", value.shape[1], num_heads_kv, "key")
    if num_heads and (num_heads_kv == 0 or num_heads % num_heads_kv):
        raise ValueError(
            f"key must have num_heads_kv that divides num_heads {num_heads} (of query), "
            f"got {num_heads_kv}"
        )
    dropout_p = checked_probability(dropout_p)
    softcap = checked_softcap(softcap)
    scale = checked_scale(scale, query.shape[2])
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    given = cu_seqlens_q, cu_seqlens_k
    cu_seqlens_q = checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, query)
    cu_seqlens_k = checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, key)
    check_same("cu_seqlens_k", "shape", cu_seqlens_k.shape, cu_seqlens_q.shape, "cu_seqlens_q")
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    mask = packed.with_lengths(masks.as_mask(attn_mask, is_causal), *given)
    spec = replace(
        normalize(
            mask, cu_seqlens_q.shape[0] - 1, num_heads, max_seqlen_q, max_seqlen_k, q,
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


def _attention_plan(
    signature: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: MaskSpec,
    scale: float,
    softcap: float,
    dropout_p: float,
    return_lse: bool,
    name: str,
) -> Callable[..., Any] | None:
    """A function of query, key, value and mask tensor like these, by backend `name`."""
    field, spec_of = "", None
    if mask is not None:
        again = remake(spec, mask)
        if again is None:
            return None
        field, spec_of = again
    in_place = all(readable_in_place(t) is t for t in (query, key, value))
    out_alone = in_place and not (_calls.needs_grad(signature) or dropout_p > 0.0 or return_lse)
    if out_alone and name == "cpp":
        return cpp.attention_call(query, key, value, spec, field, scale, softcap)
    same_spec = spec if spec_of is None else None  # or the plan would keep the mask alive

    def plan(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        own: Any = same_spec if spec_of is None or mask is None else spec_of(mask)
        out, lse = _attention(query, key, value, own, scale, softcap, dropout_p, name)
        return (out, lse) if return_lse else out

    if not (out_alone and name == "cuda"):
        return plan
    call = cuda.attention_call(query, key, value, spec, field, scale, softcap)
    if call is None:
        return plan

    def plan_in_place(*tensors: Any) -> Any:
        out = call(*tensors)
        return plan(*tensors) if out is None else out

    return plan_in_place


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
        backend: "cpp", "cuda", "triton" or "eager" instead of the automatic choice.

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
        backend: "cpp", "cuda", "triton" or "eager" instead of the automatic choice.

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
    signature = _calls.signature(
        (input, weight, bias, residual), backend, "norm", *shape, eps, rms, dropout_p,
        type(dropout_p), return_residual,
    )  # fmt: skip
    plan = _calls.find(signature)
    if plan is not None:
        return plan(input, weight, bias, residual)
    given = (input, weight, bias, residual)
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
    dropout_p = checked_probability(dropout_p)
    input, residual = ops.autocast_norm(input, residual)
    if eps is None:
        eps = torch.finfo(statistics_dtype(input.dtype)).eps
    num_columns = math.prod(shape)
    name = select(NormProblem(input.device, input.dtype, num_columns, transformed()), backend)
    options = (num_columns, eps, rms, dropout_p, return_residual)
    result = _norm_rows(input, weight, bias, residual, *options, name)
    if name != "eager" and input.numel() > 0 and input is given[0]:
        _calls.keep(signature, None, _norm_plan, signature, *given, *options, name)
    return result


def _norm_rows(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_columns: int,
    eps: float,
    rms: bool,
    dropout_p: float,
    return_residual: bool,
    name: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm by backend `name`, with a new seed."""
    num_rows = input.numel() // num_columns if num_columns else 0
    rows = input.resolve_neg().reshape(num_rows, num_columns)
    residual_rows = None if residual is None else residual.resolve_neg().reshape(rows.shape)
    weight = None if weight is None else weight.resolve_neg().reshape(num_columns)
    bias = None if bias is None else bias.resolve_neg().reshape(num_columns)
    seed = philox.new_seed(input.device) if dropout_p > 0.0 else None
    run = reference.norm if name == "eager" else autograd.norm
    tail = () if name == "eager" else (name,)
    out, total = run(rows, residual_rows, weight, bias, eps, rms, dropout_p, seed, *tail)
    out = out.reshape(input.shape)
    return (out, total.reshape(input.shape)) if return_residual else out


def _norm_plan(
    signature: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *options: Any,
) -> Callable[..., Any]:
    """A function of input, weight, bias and residual like these; options as of _norm_rows."""
    num_columns, eps, rms, dropout_p, return_residual, name = options
    parameters = [t for t in (weight, bias) if t is not None]
    as_they_are = all(t.is_contiguous() for t in (input, *parameters)) and all(
        t.dtype == statistics_dtype(input.dtype) for t in parameters
    )
    more = _calls.needs_grad(signature) or dropout_p > 0.0 or return_residual
    if as_they_are and residual is None and not more and name == "cpp":
        return cpp.norm_call(input.reshape(-1, num_columns), eps, rms)

    def plan(*tensors: Tensor | None) -> Any:
        arguments: Any = (*tensors, *options)
        return _norm_rows(*arguments)

    return plan
