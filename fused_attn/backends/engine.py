"""Base class of backends that run attention kernels of other projects."""

from __future__ import annotations

from fused_attn.backends import reference, verdicts
from fused_attn.backends.base import Backend
from fused_attn.backends.problem import NormProblem, Problem
from fused_attn.call.calls import NormCall, NormOutputs


class EngineBackend(Backend):
    """Backend whose kernels are differentiable functions of other projects.

    It is opt-in until `fused-attn verify` finds it correct and faster. Norms run on torch
    operations, so that a model can run on this backend alone, but it is never their default.
    """

    differentiable = True

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        if isinstance(problem, NormProblem):
            return ["does not support norms"]
        return verdicts.reasons_against(self.name, problem)

    def norm_fwd(self, call: NormCall, for_backward: bool, want_total: bool) -> NormOutputs:
        out, total = reference.norm(call)
        return NormOutputs(out, total.contiguous() if call.has_total else None, None, None)
