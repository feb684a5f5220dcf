"""Decompositions of the registered ops into torch operations, for ONNX export.

torch.onnx.export traces these functions, which call the reference, instead of the ops. They are not
in torch's global decomposition table, because Inductor rejects ops in it if the environment
variable CI is set.
"""

from __future__ import annotations

from typing import Any

import torch

from fused_attn.backends import reference
from fused_attn.base.namespace import OPS
from fused_attn.call.attention import AttentionCall, AttentionOutputs
from fused_attn.call.norm import NormCall, NormOutputs


def attention_fwd(call: AttentionCall) -> AttentionOutputs:
    """Compute out and lse of the op `attention_fwd` with the reference, without residuals."""
    out, lse = reference.attention(call)
    return call.outputs(False)._replace(out=out, lse=lse)


def norm_fwd(call: NormCall) -> NormOutputs:
    """Compute out and total of the op `norm_fwd` with the reference, without statistics."""
    out, total = reference.norm(call)
    return call.outputs()._replace(out=out, total=total)


def decompositions() -> dict[torch._ops.OpOverload, Any]:
    """Return a decomposition table for `ExportedProgram.run_decompositions`.

    Merge it into `torch.export.default_decompositions()`.
    """
    return {
        OPS.attention_fwd.default: lambda *v: tuple(attention_fwd(AttentionCall.of_flat(v))),
        OPS.attention_weights.default: lambda *v: reference.attention_weights(
            AttentionCall.of_flat(v), v[-2]
        ),
        OPS.norm_fwd.default: lambda *v: tuple(norm_fwd(NormCall.of_flat(v))),
    }
