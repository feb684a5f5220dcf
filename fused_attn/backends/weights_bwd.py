"""Backward of the weights in eager math, for backends without a kernel for it.

Losses on weights are rare. Heads are computed one at a time, so averaged weights do not materialize
(batch, num_heads, seqlen_q, seqlen_k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base import philox
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.calls import AttentionCall
from fused_attn.masks.materialize import materialize, of_head


def attention_weights_bwd(
    call: AttentionCall,
    lse: Tensor,
    lse_residual: Tensor,
    grad_weights: Tensor,
    average: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `Backend.attention_weights` as dS = P (G - rowsum(P G)).

    P = exp(S - lse), and G is the gradient of the weights after dropout.
    """
    query, key, spec, options = call.query, call.key, call.mask, call.options
    scale, softcap = options.scale, options.softcap
    batch, num_heads, seqlen_q, _ = query.shape
    seqlen_k, group = key.shape[2], num_heads // max(key.shape[1], 1)
    dtype = statistics_dtype(query.dtype)
    grad_query, grad_key = (torch.zeros_like(t, dtype=dtype) for t in (query, key))
    grad_bias = query.new_empty(0)
    if needs_bias and spec.bias is not None:
        grad_bias = spec.bias.new_zeros(spec.bias.shape, dtype=dtype)
    for h in range(num_heads):
        own = of_head(spec, h)
        visible, bias = materialize(own, batch, 1, seqlen_q, seqlen_k, query.device, dtype)
        q, k = query[:, h].to(dtype), key[:, h // group].to(dtype)
        if visible is not None:
            # 0 * NaN is NaN, so clear the queries and keys that are fully masked.
            visible = visible[:, 0]
            q = q.masked_fill(~visible.any(2)[..., None], 0.0)
            k = k.masked_fill(~visible.any(1)[..., None], 0.0)
        scores = (q * scale) @ k.transpose(-2, -1)
        tanh = torch.tanh(scores / softcap) if softcap > 0.0 else None
        scores = scores if tanh is None else softcap * tanh
        scores = scores if bias is None else scores + bias[:, 0]
        weights = torch.exp(scores - lse[:, h, :, None]) * torch.exp(-lse_residual[:, h, :, None])
        grad = grad_weights.to(dtype) / num_heads if average else grad_weights[:, h].to(dtype)
        if options.dropout_p > 0.0:
            assert options.seed is not None
            sizes = (batch, num_heads, seqlen_q, seqlen_k)
            own_head = slice(h, h + 1)
            keep = philox.attention_keep(
                options.seed,
                options.dropout_p,
                *sizes,
                heads=own_head,
                offsets=options.dropout_offsets,
            )
            grad = grad * (keep[:, 0].to(dtype) * philox.dropout_scale(options.dropout_p))
        if visible is not None:
            weights, grad = (t.masked_fill(~visible, 0.0) for t in (weights, grad))
        # If one key has all the weight, grad and the row sum cancel. The division by the sum of the
        # weights cancels their rounding error.
        total = weights.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0.0, 1.0)
        grad = weights * (grad - (weights * grad).sum(-1, keepdim=True) / total)
        if grad_bias.numel():
            into = grad_bias[:, h if grad_bias.shape[1] > 1 else 0]
            into += grad.sum_to_size(into.shape)
        grad = grad if tanh is None else grad * (1.0 - tanh * tanh)
        grad_query[:, h] = grad @ k * scale
        grad_key[:, h // group] += grad.transpose(-2, -1) @ q * scale
    grads = call.gradients(needs_bias)
    for grad, sums in ((grads.query, grad_query), (grads.key, grad_key), (grads.bias, grad_bias)):
        grad.copy_(sums)
    return grads.query, grads.key, grads.bias
