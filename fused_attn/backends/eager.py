"""Backend "eager": the reference, which supports every problem."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_attn.backends import reference
from fused_attn.backends.base import Backend
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
)
from fused_attn.call.norm import NormCall, NormOutputs


class EagerBackend(Backend):
    """Backend of plain, differentiable torch operations, which materialize the score matrix."""

    name = "eager"
    differentiable = True

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        out, lse = reference.attention(_unrounded(call) if call.options.partial else call)
        residual = torch.zeros_like(lse) if call.options.partial else None
        return AttentionOutputs(out, lse, residual, None)

    def attention_bwd(self, work: AttentionBackward) -> AttentionGradients:
        """Compute the gradients of a partial result. Other calls are differentiated by autograd."""
        return reference.partial_gradients(work._replace(call=_unrounded(work.call)))

    def attention_with_weights(self, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
        return reference.attention(call)[0], reference.attention_weights(call, average)

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        return reference.norm_outputs(call)

    def activation(
        self,
        input: Tensor,
        bias: Tensor | None,
        activation: str,
        dropout_p: float,
        seed: Tensor | None,
        grad_out: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        return reference.activation(input, bias, activation, dropout_p, seed, grad_out)


def _unrounded(call: AttentionCall) -> AttentionCall:
    """Return the call with query, key and value in the statistics dtype."""
    dtype = statistics_dtype(call.query.dtype)
    query, key, value = (t.to(dtype) for t in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)
