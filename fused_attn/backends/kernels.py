"""Base class of backends with GPU kernels of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fused_attn.backends import verdicts
from fused_attn.backends.base import Backend
from fused_attn.backends.problem import Problem
from fused_attn.call.calls import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    NormBackward,
    NormCall,
    NormGradients,
    NormOutputs,
)
from fused_attn.masks.tables import without_tables


class KernelBackend(Backend):
    """Backend that allocates the results of a pass, which its host code has kernels write.

    It is opt-in until `fused-attn verify` finds it correct and faster.
    """

    def attention_host(self) -> Any:
        """Return the module that launches the attention kernels."""
        raise NotImplementedError

    def norm_host(self) -> Any:
        """Return the module that launches the norm kernels."""
        raise NotImplementedError

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        return verdicts.reasons_against(self.name, problem)

    def tile_summary(self, tensor: Tensor) -> Tensor:
        return self.attention_host().tile_summary(tensor)

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        call, outputs = readable(call), call.outputs(for_backward)
        self.attention_host().attention_fwd(call, outputs)
        return outputs

    def attention_bwd(self, work: AttentionBackward) -> AttentionGradients:
        work, grads = work._replace(call=readable(work.call)), work.call.gradients(work.needs_bias)
        self.attention_host().attention_bwd(work, grads)
        return grads

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        call, weights = readable(call), call.weights(average)
        self.attention_host().attention_weights(call, lse, lse_residual, average, weights)
        return weights

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        outputs = call.outputs()
        self.norm_host().norm_fwd(call, outputs)
        return outputs

    def norm_bwd(self, work: NormBackward) -> NormGradients:
        grads = work.call.gradients(work.needs_weight, work.needs_bias)
        self.norm_host().norm_bwd(work, grads)
        return grads


def readable(call: AttentionCall, capacity: int | None = None) -> AttentionCall:
    """Return the call without the tables of masks, which only the kernels for CPUs read.

    Args:
        capacity: seqlen_k of the mask, if it is not that of `call.key`, which may be pages.
    """
    mask = without_tables(call.mask, call.sizes()[2] if capacity is None else capacity)
    return call if mask is call.mask else replace(call, mask=mask)
