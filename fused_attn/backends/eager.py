"""Backend "eager": the reference, which supports every problem."""

from __future__ import annotations

from torch import Tensor

from fused_attn.backends import reference
from fused_attn.backends.base import Backend
from fused_attn.call.calls import AttentionCall, AttentionOutputs, NormCall, NormOutputs


class EagerBackend(Backend):
    """Backend of plain, differentiable torch operations, which materialize the score matrix."""

    name = "eager"
    differentiable = True

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        out, lse = reference.attention(call)
        nothing = lse.new_empty(0)
        return AttentionOutputs(out, lse, nothing, nothing)

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        return reference.attention_weights(call, average)

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        out, total = reference.norm(call)
        nothing = out.new_empty(0)
        total = total.contiguous() if call.has_total else nothing
        return NormOutputs(out, total, nothing, nothing)

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
