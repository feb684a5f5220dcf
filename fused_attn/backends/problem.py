"""Problems: the properties of a call that backend selection may depend on."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from fused_attn.base.torch_state import dtype_name, needs_grad, transformed
from fused_attn.call.attention import AttentionCall
from fused_attn.call.norm import NormCall
from fused_attn.masks.band import Band, band_of

LARGE_SCORES = 256 << 20  # bytes

AnyCall = AttentionCall | NormCall


# Not frozen: __init__ would take 5 us longer.
@dataclass(unsafe_hash=True, slots=True)
class AttentionProblem:
    """Properties of an attention call.

    Attributes:
        mask: MaskSpec.kind of the mask.
        seqlen_q, seqlen_k: the lengths, or the maximum lengths of packed sequences; 0 if unknown.
        bias_dtype: dtype of the terms added to the scores, or None.
        learned_bias: True if bias requires a gradient.
        partial: True if the result is partial, see AttentionOptions. Only backends whose backward
            accepts the merged out and lse support it.
        result: "lse" or "weights" if that is requested in addition to out, otherwise "out".
        seeded: True if the caller passed a dropout seed.
        sharded: True if the call is a shard whose dropout uses global offsets.
        needs_grad: True if any tensor requires a gradient.
        transformed: True under a torch.func transform or forward-mode AD.
        large_scores: True if softcap or lse excludes torch's SDPA and the float32 score matrix
            takes more than LARGE_SCORES bytes. Always False on the CPU.
        band: the Band of a "structured" mask, or None if it has other conditions.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    bias_dtype: torch.dtype | None = None
    mask: str = "none"
    seqlen_q: int = 0
    seqlen_k: int = 0
    packed: bool = False
    softcap: bool = False
    dropout: bool = False
    seeded: bool = False
    sharded: bool = False
    partial: bool = False
    result: str = "out"
    learned_bias: bool = False
    needs_grad: bool = False
    transformed: bool = False
    large_scores: bool = False
    band: Band | None = None

    def __repr__(self) -> str:
        learned = "learned " if self.learned_bias else ""
        kinds = {"none": "", "causal": "causal", "bias": ""}
        return _described(
            "attention",
            self,
            f"head_dim {self.head_dim}",
            "" if self.head_dim_v == self.head_dim else f"head_dim_v {self.head_dim_v}",
            f"seqlens {self.seqlen_q} x {self.seqlen_k}" if self.seqlen_q or self.seqlen_k else "",
            kinds.get(self.mask, f"{self.mask} mask"),
            "" if self.bias_dtype is None else f"{learned}{dtype_name(self.bias_dtype)} bias",
            "" if self.result == "out" else f"with {self.result}",
        )


@dataclass(unsafe_hash=True, slots=True)
class NormProblem:
    """Properties of a layer_norm or rms_norm call. Shared fields are as in AttentionProblem."""

    device: torch.device
    dtype: torch.dtype
    num_columns: int
    rms: bool = False
    residual: bool = False
    dropout: bool = False
    seeded: bool = False
    sharded: bool = False
    needs_grad: bool = False
    transformed: bool = False

    def __repr__(self) -> str:
        op = "rms_norm" if self.rms else "layer_norm"
        return _described(op, self, f"{self.num_columns} columns")


Problem = AttentionProblem | NormProblem


_FLAGS = (
    "packed", "residual", "softcap", "dropout", "seeded", "sharded", "partial", "needs_grad",
    "transformed",
)  # fmt: skip


def _described(op: str, problem: Problem, *properties: str) -> str:
    """Describe a problem in a few words, omitting properties that have their default value."""
    words = [f"{dtype_name(problem.dtype)} on {problem.device}", *properties]
    words += [flag for flag in _FLAGS if getattr(problem, flag, False)]
    return f"{op}({', '.join(word for word in words if word)})"


def problem_of(call: AnyCall, result: str = "out", seqlen_k: int | None = None) -> Problem:
    """Return the properties of a call that selection depends on.

    Args:
        result: see AttentionProblem.
        seqlen_k: number of keys of a decoding step, whose `call.key` may be pages.
    """
    trains = needs_grad(*call.tensors())
    if isinstance(call, NormCall):
        input = call.input
        return NormProblem(
            input.device,
            input.dtype,
            input.shape[-1],
            rms=call.options.rms,
            residual=call.residual is not None,
            dropout=call.options.dropout_p > 0.0,
            seeded=call.options.seed is not None,
            sharded=_sharded(call),
            needs_grad=trains,
            transformed=transformed(),
        )
    query, mask = call.query, call.mask
    batch, seqlen_q, length = call.sizes()
    seqlen_k = length if seqlen_k is None else seqlen_k
    large_scores = False
    if query.device.type != "cpu" and (call.options.softcap or result == "lse"):
        large_scores = 4 * batch * query.shape[1] * seqlen_q * seqlen_k > LARGE_SCORES
    kind = mask.kind
    return AttentionProblem(
        query.device,
        query.dtype,
        query.shape[3],
        call.value.shape[3],
        mask.added_dtype(query.dtype),
        mask=kind,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        packed=mask.cu_seqlens_q is not None,
        softcap=bool(call.options.softcap),
        dropout=call.options.dropout_p > 0.0,
        seeded=call.options.seed is not None,
        sharded=_sharded(call),
        partial=call.options.partial,
        result=result,
        learned_bias=trains and mask.bias is not None and mask.bias.requires_grad,
        needs_grad=trains,
        transformed=transformed(),
        large_scores=large_scores,
        band=band_of(mask) if kind == "structured" else None,
    )


def _sharded(call: AnyCall) -> bool:
    return call.options.dropout_p > 0.0 and call.options.dropout_offsets is not None


def kernel_limits(
    problem: Problem, dtypes: Collection[torch.dtype], max_head_dim: float = math.inf
) -> list[str]:
    """Return the reasons why kernels with these limits do not support a problem."""
    reasons = [] if problem.dtype in dtypes else [f"does not support {problem.dtype}"]
    if problem.transformed:
        reasons.append("does not support torch.func transforms or forward-mode AD")
    if isinstance(problem, AttentionProblem):
        sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        reasons += [
            f"supports {name} up to {max_head_dim}, not {size}"
            for name, size in sizes.items()
            if size > max_head_dim
        ]
        if problem.bias_dtype is not None and problem.bias_dtype not in dtypes:
            reasons.append(f"does not support float masks of {problem.bias_dtype}")
    return reasons
