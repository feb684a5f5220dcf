"""Attention sinks: a learned logit per head that enters the softmax but has no value.

A sink adds exp(sink) to the softmax denominator of each row. The kernels are unchanged: each row of
out is multiplied by exp(lse) / (exp(lse) + exp(sink)), and autograd derives all gradients through
lse.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2; Xiao et al. 2023,
    "Efficient Streaming Language Models with Attention Sinks".
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_attn.base.torch_state import is_intercepted


def checked_sinks(sinks: object, lse: Tensor) -> Tensor:
    """Return sinks after checking that they are float (num_heads,) and match lse.

    Raises:
        ValueError, TypeError: sinks are anything else; the message says what was expected.
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
        raise ValueError(f"sinks must have device {lse.device} (as query), got {sinks.device}")
    return sinks


def add_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, *, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention with sinks, computed from those without.

    Args:
        out: (*, num_heads, seqlen_q, head_dim_v); changed in place if no gradient is wanted.
        lse: (*, num_heads, seqlen_q).
        sinks: (num_heads,). -inf is clamped to the lowest finite number, and adds nothing.
        packed: out is (total_q, num_heads, head_dim_v).
    """
    # Without the clamp, lse - logits is NaN in fully masked rows with a sink of -inf.
    logits = sinks.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None]
    share = torch.sigmoid(lse - logits)
    factor = (share.mT if packed else share)[..., None]
    total = torch.logaddexp(lse, logits.expand_as(lse))
    differentiable = torch.is_grad_enabled() and (out.requires_grad or factor.requires_grad)
    if differentiable or is_intercepted():  # vmap cannot write a batch into an unbatched out
        return (out * factor).to(out.dtype), total
    return out.mul_(factor), total
