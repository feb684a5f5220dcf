"""Reference: attention and norms in plain torch operations, differentiable to any order.

The tests compare kernels against the reference in float64. `compare` and the benchmarks call it
"eager". It also computes second-order gradients, and implements the backend "eager", which supports
every problem.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_attn.base import philox
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call import packed
from fused_attn.call.attention import AttentionBackward, AttentionCall, AttentionGradients
from fused_attn.call.norm import NormCall, NormOutputs
from fused_attn.masks.materialize import materialize


def attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute attention (Vaswani et al. 2017, equation 1), materializing the score matrix.

    Returns:
        out (batch, num_heads, seqlen_q, head_dim_v) in the dtype of query, and lse (batch,
        num_heads, seqlen_q) in float32 (float64 for float64).
    """
    if call.mask.cu_seqlens_q is not None:
        return packed.over_padded(call, attention)
    weights, value, empty, lse = _weights(call)
    # masked_fill also zeroes the gradient of fully masked rows, even if it is NaN.
    return (weights.to(value.dtype) @ value).masked_fill(empty, 0.0), lse


def partial_gradients(work: AttentionBackward) -> AttentionGradients:
    """Compute the gradients of a partial result (see AttentionOptions) from merged outputs.

    With weights P = exp(S - lse), the gradient of the scores is dS = P (dP - delta), where
    delta = rowsum(grad_out * out) - grad_lse. Source: Dao et al. 2022, "FlashAttention", appendix
    B.4.

    Args:
        work: the call must not be packed, and query, key and value must have the statistics dtype.
            The outputs are the merged ones; out_residual is not read.
    """
    call, outputs, grad_out, grad_lse, _ = work
    bias, dtype = call.mask.bias, call.query.dtype
    leaves = [call.query, call.key, *([] if bias is None else [bias.to(dtype)])]
    leaves = [t.detach().requires_grad_() for t in leaves]
    mask = call.mask if bias is None else replace(call.mask, bias=leaves[2])
    with torch.enable_grad():
        own = replace(call, query=leaves[0], key=leaves[1], value=call.value.detach(), mask=mask)
        scores, value = _scores(own)
    lse = outputs.lse + outputs.lse_residual
    shift = lse.masked_fill(lse == float("-inf"), 0.0)[..., None]
    weights = torch.exp(scores.detach() - shift)
    empty = (lse == float("-inf"))[..., None]  # 0 * NaN is NaN
    grad_out = grad_out.to(value.dtype).masked_fill(empty, 0.0)
    grad_weights, kept = grad_out @ value.transpose(-2, -1), weights
    if call.options.dropout_p > 0.0:
        factor = _dropout_factor(call, scores)
        grad_weights, kept = grad_weights * factor, weights * factor
    delta = (grad_out * outputs.out.to(value.dtype)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    grad_scores = weights * (grad_weights - delta[..., None])
    grads = torch.autograd.grad(scores, leaves, grad_scores.masked_fill(weights == 0.0, 0.0))
    grad_value = kept.transpose(-2, -1) @ grad_out
    num_heads, num_heads_kv = call.query.shape[1], call.key.shape[1]
    group = num_heads // max(num_heads_kv, 1)
    grad_value = grad_value.unflatten(1, (num_heads_kv, group)).sum(2)
    return AttentionGradients(grads[0], grads[1], grad_value, grads[2] if len(grads) > 2 else None)


def attention_weights(call: AttentionCall, average: bool) -> Tensor:
    """Compute the attention weights after dropout.

    Args:
        average: True to average over the heads.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k), or (batch, seqlen_q, seqlen_k) if averaged, in the
        dtype of query. Fully masked rows are 0.
    """
    weights, _, empty, _ = _weights(call)
    weights = weights.to(call.query.dtype).masked_fill(empty, 0.0)
    return weights.mean(dim=1) if average else weights


def _weights(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights after dropout, value with num_heads heads, fully masked rows, and lse."""
    scores, value = _scores(call)
    seqlen_k = scores.shape[3]
    statistics = statistics_dtype(scores.dtype)
    lowest = scores.new_full((*scores.shape[:3], 1), float("-inf"))  # amax rejects empty dimensions
    maximum = scores.detach().amax(-1, keepdim=True) if seqlen_k else lowest
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True, dtype=statistics)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    lse = (maximum.to(statistics) + total.log()).masked_fill(empty, float("-inf")).squeeze(-1)
    weights = weights / total.to(weights.dtype)
    if call.options.dropout_p > 0.0:
        weights = weights * _dropout_factor(call, scores)
    return weights, value, empty, lse


def _dropout_factor(call: AttentionCall, scores: Tensor) -> Tensor:
    """Return the factor of each weight under dropout, 0 or 1 / (1 - p), in the dtype of scores."""
    options = call.options
    assert options.seed is not None
    p, offsets = options.dropout_p, options.dropout_offsets
    keep = philox.attention_keep(options.seed, p, *scores.shape, offsets=offsets)
    return keep.to(scores.dtype) * philox.dropout_scale(p)


def _scores(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the masked scores, and value repeated to num_heads."""
    query, key, value = call.query, call.key, call.value
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_k, group = key.shape[2], num_heads // max(key.shape[1], 1)
    visible, bias = materialize(
        call.mask, batch, num_heads, seqlen_q, seqlen_k, query.device, statistics_dtype(query.dtype)
    )
    key, value = (t.repeat_interleave(group, 1) if group > 1 else t for t in (key, value))
    if visible is not None:
        # Zero fully masked keys, values and queries, as 0 * NaN is NaN.
        unseen = ~visible.any(2)[..., None]
        key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
        query = query.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    scores = (query * call.options.scale) @ key.transpose(-2, -1)
    softcap = call.options.softcap
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores, value


def norm(call: NormCall) -> tuple[Tensor, Tensor]:
    """Return the norm of residual + dropout(input), and that sum."""
    total, options = call.input, call.options
    if options.dropout_p > 0.0:
        assert options.seed is not None
        p, offsets = options.dropout_p, options.dropout_offsets
        keep = philox.norm_keep(options.seed, p, call.rows, total.shape[-1], offsets=offsets)
        keep = keep.reshape(total.shape)
        total = total * (keep.to(total.dtype) * philox.dropout_scale(p))
    if call.residual is not None:
        total = call.residual + total
    return norm_of(total, call), total


def norm_outputs(call: NormCall) -> NormOutputs:
    """Compute the outputs of a norm call, for backends whose norms are torch operations."""
    out, total = norm(call)
    return NormOutputs(out, total.contiguous() if call.has_total else None, None, None)


def norm_of(total: Tensor, call: NormCall) -> Tensor:
    """Normalize rows by layer norm (Ba et al. 2016) or RMS norm (Zhang and Sennrich 2019)."""
    shape, weight, bias = total.shape[-1:], call.weight, call.bias
    if not call.options.rms:
        weight, bias = (t if t is None else t.to(total.dtype) for t in (weight, bias))
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)  # without it, torch (2.13) has no second derivatives
        return torch.layer_norm(total, shape, weight, bias, call.options.eps)
    if weight is None or weight.dtype == total.dtype:
        return torch.rms_norm(total, shape, weight, call.options.eps)
    out = torch.rms_norm(total, shape, None, call.options.eps)
    return (out * weight).to(total.dtype)


def activation(
    input: Tensor,
    bias: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Implement `Backend.activation` in torch operations."""
    backward = grad_out is not None
    if activation == "relu" and grad_out is not None:
        kept = ~(input <= 0)  # input is the result of the forward; NaN counts as positive
        return torch.where(kept, grad_out * philox.dropout_scale(dropout_p), 0)
    total = input if bias is None else input + bias
    value = total if grad_out is None else grad_out
    if not backward:
        value = _activated(total, activation)
    if dropout_p > 0.0:
        assert seed is not None
        rows, columns = input.shape[:-1].numel(), input.shape[-1]
        kept = philox.norm_keep(seed, dropout_p, rows, columns).view(input.shape)
        value = torch.where(kept, value * philox.dropout_scale(dropout_p), 0)
    if backward and activation != "identity":
        value = torch.ops.aten.gelu_backward(value, total, approximate=_APPROXIMATE[activation])
    return value


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _activated(total: Tensor, activation: str) -> Tensor:
    if activation == "identity":
        return total
    if activation == "relu":
        return total.relu()
    return torch.nn.functional.gelu(total, approximate=_APPROXIMATE[activation])


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return query and a positive scale with the same scores.

    Kernels that multiply scores by the scale after masking give NaN for other scales: they multiply
    -inf by it, and subtract the maximum of the unscaled scores.
    """
    if scale > 0.0:
        return query, scale
    return (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)
