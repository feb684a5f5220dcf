"""Decompositions of the registered ops into torch operations, for ONNX export.

torch.onnx.export traces these functions, which call the reference, instead of the ops. They are not
in torch's global decomposition table, because Inductor rejects ops in it if the environment
variable CI is set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import reference
from fused_attn.base.namespace import OPS
from fused_attn.call.attention import AttentionCall, AttentionOutputs
from fused_attn.call.norm import NormCall, NormOutputs


def attention_fwd(call: AttentionCall) -> AttentionOutputs:
    """Compute out and lse of the op `attention_fwd` with the reference, without residuals."""
    out, lse = reference.attention(call)
    return call.outputs(False)._replace(out=out, lse=lse)


def attention_weights(call: AttentionCall, average: bool) -> Tensor:
    """Compute the result of the op `attention_weights` with the reference."""
    return reference.attention_weights(call, average)


def norm_fwd(call: NormCall) -> NormOutputs:
    """Compute out and total of the op `norm_fwd` with the reference, without statistics."""
    out, total = reference.norm(call)
    return call.outputs()._replace(out=out, total=total)


def _attention_fwd(*values: Any) -> tuple[Tensor, ...]:
    return tuple(attention_fwd(AttentionCall.of_flat(values)))


def _attention_weights(*values: Any) -> Tensor:
    return attention_weights(AttentionCall.of_flat(values), values[-2])


def _norm_fwd(*values: Any) -> tuple[Tensor, ...]:
    return tuple(norm_fwd(NormCall.of_flat(values)))


def decompositions() -> dict[torch._ops.OpOverload, Any]:
    """Return a decomposition table for `ExportedProgram.run_decompositions`.

    Merge it into `torch.export.default_decompositions()`.
    """
    return {
        OPS.attention_fwd.default: _attention_fwd,
        OPS.attention_weights.default: _attention_weights,
        OPS.norm_fwd.default: _norm_fwd,
    }
