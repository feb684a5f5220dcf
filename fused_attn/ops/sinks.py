"""Attention sinks: a learned logit for each head that is added to the softmax, but has no value.

A sink adds exp(sink) to the softmax denominator of each row. Kernels do not support sinks. Instead,
each row of out is multiplied by exp(lse) / (exp(lse) + exp(sink)), and autograd computes the
gradients of query, key and sinks through lse.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2; Xiao et al. 2023,
    "Efficient Streaming Language Models with Attention Sinks".
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import is_intercepted


def checked_sinks(sinks: object, lse: Tensor) -> Tensor:
    """Validate sinks, which must be a float tensor (num_heads,) on the device of lse.

    Args:
        lse: (*, num_heads, seqlen_q).
    """
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks must be a float tensor, got {got}")
    if lse.dim() < 2:
        raise ValueError("query must have at least 3 dimensions with sinks, got 2")
    if sinks.shape != lse.shape[-2:-1]:
        expected = f"({lse.shape[-2]},) (num_heads)"
        raise ValueError(f"sinks must have shape {expected}, got {tuple(sinks.shape)}")
    if sinks.device != lse.device:
        raise ValueError(f"sinks must have device {lse.device} (like query), got {sinks.device}")
    return sinks


def add_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, *, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention with sinks, given those of attention without sinks.

    Args:
        out: (*, num_heads, seqlen_q, head_dim_v), or (total_q, num_heads, head_dim_v) if packed.
            Overwritten if no gradient is needed and the call is not intercepted.
        lse: (*, num_heads, seqlen_q), or (num_heads, total_q) if packed.
        sinks: (num_heads,). A sink of -inf has no effect.
        packed: the call has packed sequences.
    """
    # Clamp sinks of -inf, because lse - logits would be NaN in fully masked rows (lse is -inf).
    logits = sinks.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None]
    share = torch.sigmoid(lse - logits)
    factor = (share.mT if packed else share)[..., None]
    differentiable = torch.is_grad_enabled() and (out.requires_grad or factor.requires_grad)
    # Under vmap, an unbatched out cannot be multiplied in place by a batched factor.
    if differentiable or is_intercepted():
        return (out * factor).to(out.dtype), _logaddexp(lse, logits, sinks)
    return out.mul_(factor), torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))


def _logaddexp(lse: Tensor, logits: Tensor, sinks: Tensor) -> Tensor:
    """Return log(exp(lse) + exp(sinks)).

    The second derivative of torch.logaddexp is NaN if the exponential of the difference overflows.

    Args:
        lse: as in `add_sinks`.
        logits: sinks without -inf, (num_heads, 1).
        sinks: (num_heads,).
    """
    known = lse.clamp(min=torch.finfo(lse.dtype).min)
    more = known - logits
    # softplus is linear above the threshold, where exp(-threshold) is below half an ulp.
    of_lse = known + torch.nn.functional.softplus(-more, threshold=40.0)
    of_sink = logits + torch.nn.functional.softplus(more, threshold=40.0)
    nothing = (lse == float("-inf")) & (sinks == float("-inf"))[:, None]
    return torch.where(more > 0, of_lse, of_sink).masked_fill(nothing, float("-inf"))
