"""Base class of backends that run attention kernels of other projects."""

from __future__ import annotations

from fused_attn.backends import verdicts
from fused_attn.backends.base import Backend
from fused_attn.backends.problem import NormProblem, Problem


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
