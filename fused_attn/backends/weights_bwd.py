"""Backward of the attention weights in torch operations, for backends without a kernel for it.

Losses on attention weights are rare. Heads are processed one at a time, so that averaged weights
need no (batch, num_heads, seqlen_q, seqlen_k) tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base import philox
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.attention import WeightsBackward
from fused_attn.masks.materialize import materialize
from fused_attn.masks.restrict import of_heads


def attention_weights_bwd(work: WeightsBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and bias for a loss on the attention weights.

    The gradient of the scores is dS = P (G - rowsum(P G)). P = exp(S - lse) are the weights before
    dropout, and G is the gradient with respect to P.
    """
    call, lse, lse_residual, grad_weights, average, needs_bias = work
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
        own = of_heads(spec, slice(h, h + 1))
        visible, bias = materialize(own, batch, 1, seqlen_q, seqlen_k, query.device, dtype)
        q, k = query[:, h].to(dtype), key[:, h // group].to(dtype)
        if visible is not None:
            # Zero fully masked queries and keys, as 0 * NaN is NaN.
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
            one_head = slice(h, h + 1)
            keep = philox.attention_keep(
                options.seed,
                options.dropout_p,
                *sizes,
                heads=one_head,
                offsets=options.dropout_offsets,
            )
            grad = grad * (keep[:, 0].to(dtype) * philox.dropout_scale(options.dropout_p))
        if visible is not None:
            weights, grad = (t.masked_fill(~visible, 0.0) for t in (weights, grad))
        # If one key has all the weight, grad and the row sum cancel. Dividing the row sum by the
        # sum of the weights removes the rounding error of the weights.
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
