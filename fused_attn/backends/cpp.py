"""The CPU kernels (csrc/cpu): tensors to the fields of csrc/params.h."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.base import Backend
from fused_attn.backends.fields import (
    DTYPES,
    add,
    attention_fields,
    contiguous_as,
    norm_fields,
    pointer,
    summary_fields,
)
from fused_attn.backends.problem import Problem, kernel_limits
from fused_attn.core.call import (
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    NormCall,
    NormGradients,
    NormOutputs,
)
from fused_attn.core.layout import readable_in_place
from fused_attn.masks.spec import MaskSpec

try:
    from fused_attn import _cpu
except ImportError as error:  # pragma: no cover - a broken installation
    _cpu, _import_error = None, str(error)  # type: ignore[assignment]

MAX_HEAD_DIM = 256
# Smaller blocks stay with malloc, which reuses them; taking one from the pool costs 4 microseconds.
_POOLED_FROM = 1 << 20


class CppBackend(Backend):
    """The kernels of the best instruction set that the CPU has."""

    name = "cpp"

    def unavailable(self) -> list[str]:
        return [] if _cpu is not None else [f"fused_attn._cpu cannot be imported: {_import_error}"]

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        if problem.device.type != "cpu":
            reasons.append(f"runs on cpu, not on {problem.device.type}")
        return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)

    def empty(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """An uninitialised dense tensor; a large one in memory that earlier ones have left."""
        if math.prod(shape) * dtype.itemsize < _POOLED_FROM or len(shape) > 4:
            return torch.empty_strided(shape, strides, dtype=dtype)
        return torch.from_dlpack(_cpu.pooled_tensor(tuple(shape), tuple(strides), DTYPES[dtype]))

    def tile_summary(self, tensor: Tensor) -> Tensor:
        summary, fields = summary_fields(tensor, _cpu.SUMMARY_TILE)
        _cpu.tile_summary(**fields, num_threads=torch.get_num_threads())
        return summary

    def attention_fwd(self, call: AttentionCall, for_backward: bool) -> AttentionOutputs:
        outputs = call.outputs(self.empty, for_backward)
        fields, _alive = self._fields(call, outputs.out)
        if for_backward:
            fields["lse_low"] = outputs.lse_low.data_ptr()
        _cpu.attention_fwd(**fields, lse=outputs.lse.data_ptr())
        return outputs

    def attention_bwd(
        self,
        call: AttentionCall,
        outputs: AttentionOutputs,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs_bias: bool,
    ) -> AttentionGradients:
        grads = call.gradients(self.empty, needs_bias)
        grad_out, lse = readable_in_place(grad_out), outputs.lse
        fields, _alive = self._fields(call, outputs.out)
        fields["lse"], fields["lse_low"] = lse.data_ptr(), outputs.lse_low.data_ptr()
        add(fields, "grad_out", grad_out)
        add(fields, "grad_query", grads.query)
        add(fields, "grad_key", grads.key)
        add(fields, "grad_value", grads.value)
        if grad_lse is not None:
            grad_lse = grad_lse.to(lse.dtype).contiguous().resolve_neg()
            fields["grad_lse"] = grad_lse.data_ptr()
        _run_bwd(fields, lse, grads.bias if needs_bias else None)
        return grads

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_low: Tensor, average: bool
    ) -> Tensor:
        weights = call.weights(self.empty, average)
        fields, _alive = self._weights_fields(call, lse, lse_low)
        _cpu.attention_weights(**fields, weights=weights.data_ptr(), average=average)
        return weights

    def attention_weights_bwd(
        self,
        call: AttentionCall,
        lse: Tensor,
        lse_low: Tensor,
        grad_weights: Tensor,
        average: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = call.gradients(self.empty, needs_bias)
        grad_weights, num_heads = readable_in_place(grad_weights), call.query.shape[1]
        fields, _alive = self._weights_fields(call, lse, lse_low)
        add(fields, "grad_query", grads.query)
        add(fields, "grad_key", grads.key)
        heads = grad_weights[:, None].expand(-1, num_heads, -1, -1) if average else grad_weights
        add(fields, "grad_weights", heads)
        fields["grad_weights_factor"] = 1.0 / max(num_heads, 1) if average else 1.0
        row_sums = torch.empty_like(lse)
        fields["row_sums"] = row_sums.data_ptr()
        _run_bwd(fields, lse, grads.bias if needs_bias else None)
        return grads.query, grads.key, grads.bias

    def norm_fwd(self, call: NormCall) -> NormOutputs:
        input, residual = call.input.contiguous(), call.residual
        outputs = call.outputs(self.empty)
        residual = None if residual is None else residual.contiguous()
        statistics = outputs.rstd.dtype
        weight, bias = contiguous_as(call.weight, statistics), contiguous_as(call.bias, statistics)
        _cpu.norm_fwd(
            **self._norm_fields(call),
            eps=call.eps,
            input=input.data_ptr(),
            residual=pointer(residual),
            weight=pointer(weight),
            bias=pointer(bias),
            **{name: t.data_ptr() for name, t in outputs._asdict().items()},
        )
        return outputs

    def norm_bwd(
        self,
        call: NormCall,
        mean: Tensor,
        rstd: Tensor,
        grad_out: Tensor,
        grad_total: Tensor | None,
        needs_weight: bool,
        needs_bias: bool,
    ) -> NormGradients:
        total, grad_out = call.input.contiguous(), grad_out.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        weight = contiguous_as(call.weight, mean.dtype)
        grads = call.gradients(self.empty, needs_weight, needs_bias)
        _cpu.norm_bwd(
            **self._norm_fields(call),
            total=total.data_ptr(),
            weight=pointer(weight),
            mean=mean.data_ptr(),
            rstd=rstd.data_ptr(),
            grad_out=grad_out.data_ptr(),
            grad_total=pointer(grad_total),
            grad_input=grads.input.data_ptr(),
            grad_residual=grads.total.data_ptr(),
            grad_weight=grads.weight.data_ptr(),
            grad_bias=grads.bias.data_ptr(),
        )
        return grads

    def _fields(self, call: AttentionCall, out: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
        """The fields of AttentionParams, and tensors that must outlive the call."""
        q, k, v = (readable_in_place(t) for t in (call.query, call.key, call.value))
        if not (q is call.query and k is call.key and v is call.value):
            call = replace(call, query=q, key=k, value=v)
        spec = call.mask
        summaries = (
            ("dense", spec.dense, spec.dense_summary),
            ("bias", spec.bias, spec.bias_summary),
        )
        fields, alive = attention_fields(call, out, summaries, self.tile_summary)
        return {**fields, **_run_options(call)}, alive

    def _weights_fields(
        self, call: AttentionCall, lse: Tensor, lse_low: Tensor
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """`_fields` of a problem without values, whose lse is known."""
        query, key = call.query, call.key
        value, out = key.new_empty(*key.shape[:3], 0), query.new_empty(*query.shape[:3], 0)
        fields, alive = self._fields(replace(call, value=value), out)
        lse, lse_low = lse.contiguous(), lse_low.contiguous()
        fields["lse"], fields["lse_low"] = lse.data_ptr(), lse_low.data_ptr()
        return fields, [*alive, out, lse, lse_low]

    def _norm_fields(self, call: NormCall) -> dict[str, Any]:
        return {**norm_fields(call), **_run_options(call)}


def isa() -> str:
    """The instruction set whose kernels run: an entry of csrc/cpu/isas.inc."""
    return _cpu.isa()


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Within the block the kernels of a lower instruction set run; for tests, process-wide."""
    _cpu.set_isa(name)
    try:
        yield
    finally:
        _cpu.set_isa("")


def tile_kinds(
    spec: MaskSpec, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, int]]:
    """How the kernels classify the tiles of a problem; for tests and tools.

    Returns:
        (batch, num_heads, panels, blocks) uint8, 0 for tiles that are skipped, 1 for partial and
        2 for full ones; and the tile's size, in queries and keys.
    """
    panel, block = _cpu.tile_size(DTYPES[dtype])
    shape = (batch, num_heads, -(-seqlen_q // panel), -(-seqlen_k // block))
    kinds = torch.empty(shape, dtype=torch.uint8)
    empty = torch.empty(batch, num_heads, seqlen_q, 0, dtype=dtype)
    keys = torch.empty(batch, num_heads, seqlen_k, 0, dtype=dtype)
    fields, _alive = CppBackend()._fields(AttentionCall(empty, keys, keys, spec, 1.0), empty)
    _cpu.tile_kinds(**fields, kinds=kinds.data_ptr())
    return kinds, (panel, block)


def _run_options(call: AttentionCall | NormCall) -> dict[str, Any]:
    seed = 0 if call.dropout_p == 0.0 or call.seed is None else int(call.seed.item())
    return {"seed": seed, "num_threads": torch.get_num_threads()}


def _run_bwd(fields: dict[str, Any], lse: Tensor, grad_bias: Tensor | None) -> None:
    """Runs the backward; gradients of a float mask are added up in the type of lse."""
    if grad_bias is None:
        _cpu.attention_bwd(**fields)
        return
    sums = torch.zeros_like(grad_bias, dtype=lse.dtype)
    _cpu.attention_bwd(**fields, grad_bias=sums.data_ptr())
    grad_bias.copy_(sums)
