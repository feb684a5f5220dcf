"""Base classes of the backends that are opt-in until `fused-attn verify` accepts them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fused_attn.backends import reference, verdicts, weights_bwd
from fused_attn.backends.base import Backend, Extent
from fused_attn.backends.problem import NormProblem, Problem
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    WeightsBackward,
)
from fused_attn.call.norm import NormBackward, NormCall, NormGradients, NormOutputs
from fused_attn.call.options import with_dense_offsets
from fused_attn.masks.spec import with_summaries
from fused_attn.masks.tables import without_tables


class OptInBackend(Backend):
    """Backend that is opt-in until `fused-attn verify` finds it correct and faster."""

    def default_for(self, device_type: str) -> Extent:
        return "some" if verdicts.any_usable(self.name, device_type) else "none"

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        return verdicts.reasons_against(self.name, problem)


class EngineBackend(OptInBackend):
    """Backend whose attention kernels are differentiable functions of other projects.

    Norms run on torch operations, so that a model can run on this backend alone. The backend is
    never the default for norms.
    """

    differentiable = True

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        if isinstance(problem, NormProblem):
            return ["does not support norms"]
        return super().opt_in_reasons(problem)

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        return reference.norm_outputs(call)


class KernelBackend(OptInBackend):
    """Backend with GPU kernels of this package. It allocates results, and host code fills them.

    Empty problems never reach the host code.
    """

    def attention_host(self) -> Any:
        """Return the module that launches the attention kernels."""
        raise NotImplementedError

    def norm_host(self) -> Any:
        """Return the module that launches the norm kernels."""
        raise NotImplementedError

    def readable(self, call: AttentionCall, capacity: int | None = None) -> AttentionCall:
        """Return the call with a mask and options that kernels read.

        The host code itself copies query, key and value if kernels cannot read their strides.

        Args:
            capacity: seqlen_k of the mask, if it is not that of `call.key`, which may be pages.
        """
        seqlen_k = call.sizes()[2] if capacity is None else capacity
        # Only the CPU kernels read intervals and bits.
        mask = without_tables(call.mask.kernel_layout(), seqlen_k)
        with_summaries(mask, self.tile_summary)
        options = with_dense_offsets(call.options)
        return AttentionCall(call.query, call.key, call.value, mask, options)

    def tile_summary(self, tensor: Tensor) -> Tensor:
        return self.attention_host().tile_summary(tensor)

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        outputs = call.outputs(for_backward)
        out, lse, lse_residual, out_residual = outputs
        if 0 in (lse.numel(), *call.sizes()):
            out.zero_(), lse.fill_(-math.inf), lse_residual.zero_(), out_residual.zero_()
            return outputs
        self.attention_host().attention_fwd(self.readable(call), outputs)
        return outputs

    def attention_bwd(self, work: AttentionBackward) -> AttentionGradients:
        call, grads = work.call, work.call.gradients(work.needs_bias)
        if 0 in (call.query.shape[1], *call.sizes()):
            for grad in grads:
                grad.zero_()
            return grads
        work = work._replace(call=self.readable(call), outputs=work.outputs.kernel_layout())
        self.attention_host().attention_bwd(work, grads)
        return grads

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        weights = call.weights(average)
        if weights.numel() == 0 or call.query.shape[1] == 0:
            return weights.zero_()
        call = self.readable(call)
        self.attention_host().attention_weights(call, lse, lse_residual, average, weights)
        return weights

    def attention_weights_bwd(self, work: WeightsBackward) -> tuple[Tensor, Tensor, Tensor]:
        return weights_bwd.attention_weights_bwd(work)

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        outputs = call.outputs()
        if call.input.numel() > 0:
            self.norm_host().norm_fwd(call, outputs)
        return outputs

    def norm_bwd(self, work: NormBackward) -> NormGradients:
        grads = work.call.gradients(work.needs_weight, work.needs_bias)
        if work.call.input.numel() == 0:
            grads.weight.zero_(), grads.bias.zero_()
            return grads
        self.norm_host().norm_bwd(work, grads)
        return grads
