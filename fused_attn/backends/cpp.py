"""The CPU kernels (csrc/cpu), which read calls and the fields that a pass adds (csrc/fields)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.base import ACTIVATIONS, Backend
from fused_attn.backends.fields import DTYPES, check_fields, empty_summary
from fused_attn.backends.problem import Problem, kernel_limits
from fused_attn.base.layout import contiguous, readable_in_place, rows_in_place
from fused_attn.base.torch_state import learns
from fused_attn.call.calls import (
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    NormCall,
    NormGradients,
    NormOutputs,
)
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, spec_at_once, spec_of_ends, with_summaries

try:
    from fused_attn import _cpu
except ImportError as error:  # pragma: no cover - a broken installation
    _cpu, _import_error = None, str(error)  # type: ignore[assignment]

# A capsule of C functions that read and make tensors, from torch 2.10 on; without it small calls
# take longer, and large outputs are torch's.
_EXCHANGE_API = getattr(Tensor, "__dlpack_c_exchange_api__", None)
if _cpu is not None:
    check_fields(_cpu.CALL_FIELDS)
    _cpu.set_torch(Tensor, torch.nn.Parameter, _EXCHANGE_API)

MAX_HEAD_DIM = 256
# Smaller blocks stay with malloc, which reuses them; larger ones it may give back at every free.
_POOLED_FROM = 1 << 17
_MASK64 = (1 << 64) - 1
_RESULTS = {**DTYPES, torch.int16: -1}  # of out_low


class CppBackend(Backend):
    """The kernels of the best instruction set that the CPU has."""

    name = "cpp"
    trains_at_once = True

    def unavailable(self) -> list[str]:
        return [] if _cpu is not None else [f"fused_attn._cpu cannot be imported: {_import_error}"]

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        if problem.device.type != "cpu":
            reasons.append(f"runs on cpu, not on {problem.device.type}")
        return reasons + kernel_limits(problem, DTYPES, MAX_HEAD_DIM)

    def asked_first(self, device_type: str) -> bool:
        return device_type == "cpu" and not self.unavailable()

    def empty(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """An uninitialised dense tensor; a large one in memory that earlier ones have left."""
        if _EXCHANGE_API is None or math.prod(shape) * dtype.itemsize < _POOLED_FROM:
            return torch.empty_strided(shape, strides, dtype=dtype)
        return _cpu.empty_tensor(shape, strides, _RESULTS[dtype])

    def tile_summary(self, tensor: Tensor) -> Tensor:
        summary = empty_summary(tensor, _cpu.SUMMARY_TILE)
        _cpu.tile_summary(tensor=tensor, summary=summary, num_threads=torch.get_num_threads())
        return summary

    def attention_at_once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | Mask | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor | None:
        if type(dropout_p) not in (float, int) or dropout_p != 0.0 or learns(query):
            return None
        spec = None
        if attn_mask is not None or is_causal:
            spec = spec_at_once(attn_mask, is_causal, query, key)
            if spec is None:
                return None
            if isinstance(attn_mask, Mask):
                spec = with_summaries(spec, self.tile_summary)
        return _cpu.attention(
            query, key, value, spec, scale, enable_gqa,
            torch.is_grad_enabled(), torch.get_num_threads(), False, 0.0, None,
        )  # fmt: skip

    def outputs_at_once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spec: MaskSpec | None,
        scale: float | None,
        dropout_p: float,
        draw: Callable[[], int],
        enable_gqa: bool,
    ) -> AttentionOutputs | None:
        outputs = _cpu.attention(
            query, key, value, spec, scale, enable_gqa,
            True, torch.get_num_threads(), True, dropout_p, draw,
        )  # fmt: skip
        return None if outputs is None else AttentionOutputs(*outputs)

    def gradients_at_once(
        self,
        grad_out: Tensor,
        outputs: AttentionOutputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spec: MaskSpec | None,
        scale: float | None,
        dropout_p: float,
        draw: Callable[[], int],
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        return _cpu.attention_gradients(
            grad_out, outputs, query, key, value, spec, scale,
            torch.get_num_threads(), dropout_p, draw,
        )  # fmt: skip

    def decode_at_once(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Sequence[int],
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor | None:
        spec = spec_of_ends(ends, query.shape[2], is_causal)
        return _cpu.attention(
            query, key, value, spec, scale, enable_gqa,
            torch.is_grad_enabled(), torch.get_num_threads(), False, 0.0, None,
        )  # fmt: skip

    def packed_at_once(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float | None
    ) -> Tensor | None:
        if learns(query):
            return None
        return _cpu.attention(
            query, key, value, with_summaries(spec, self.tile_summary), scale, True,
            torch.is_grad_enabled(), torch.get_num_threads(), False, 0.0, None,
        )  # fmt: skip

    def norm_at_once(
        self,
        input: Tensor,
        shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        rms: bool,
        with_total: bool,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        return _cpu.norm(
            input, shape, weight, bias, residual, eps, rms, with_total,
            torch.is_grad_enabled(), torch.get_num_threads(), False, 0.0, None,
        )  # fmt: skip

    def norm_outputs_at_once(
        self,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rms: bool,
        dropout_p: float,
        draw: Callable[[], int],
    ) -> tuple[Tensor | None, ...] | None:
        return _cpu.norm(
            input, input.shape[-1:], weight, bias, residual, eps, rms, False,
            True, torch.get_num_threads(), True, dropout_p, draw,
        )  # fmt: skip

    def norm_gradients_at_once(
        self,
        grad_out: Tensor,
        grad_total: Tensor | None,
        total: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        eps: float,
        rms: bool,
        dropout_p: float,
        draw: Callable[[], int],
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor | None, ...] | None:
        return _cpu.norm_gradients(
            grad_out, grad_total, total, mean, rstd, weight, eps, rms, needs_weight, needs_bias,
            torch.get_num_threads(), dropout_p, draw,
        )  # fmt: skip

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
        columns = input.shape[-1]
        rows = input.numel() // columns
        if out is None:
            out = self.empty(*contiguous(input.shape), input.dtype, input.device)
        _cpu.activation(
            input=input, bias=bias, grad_out=grad_out, out=out, dtype=DTYPES[input.dtype],
            rows=rows, columns=columns, activation=ACTIVATIONS.index(activation),
            dropout_p=dropout_p, seed=0 if seed is None else int(seed) & _MASK64,
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        return out

    def attention_fwd(self, call: AttentionCall, for_backward: bool) -> AttentionOutputs:
        outputs = call.outputs(self.empty, for_backward)
        _cpu.attention_fwd(call, **outputs._asdict(), num_threads=torch.get_num_threads())
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
        lse = outputs.lse
        fields = {
            **outputs._asdict(),
            "grad_out": readable_in_place(grad_out),
            "grad_query": grads.query,
            "grad_key": grads.key,
            "grad_value": grads.value,
        }
        if grad_lse is not None:
            fields["grad_lse"] = grad_lse.to(lse.dtype).contiguous().resolve_neg()
        _run_bwd(call, fields, lse, grads.bias if needs_bias else None)
        return grads

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_low: Tensor, average: bool
    ) -> Tensor:
        weights = call.weights(self.empty, average)
        call, fields = _of_weights(call, lse, lse_low)
        threads = torch.get_num_threads()
        _cpu.attention_weights(
            call, **fields, weights=weights, average=average, num_threads=threads
        )
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
        if average:
            grad_weights = grad_weights[:, None].expand(-1, num_heads, -1, -1)
        call, fields = _of_weights(call, lse, lse_low)
        fields |= {
            "grad_query": grads.query,
            "grad_key": grads.key,
            "grad_weights": grad_weights,
            "grad_weights_factor": 1.0 / max(num_heads, 1) if average else 1.0,
            "row_sums": torch.empty_like(lse),
        }
        _run_bwd(call, fields, lse, grads.bias if needs_bias else None)
        return grads.query, grads.key, grads.bias

    def norm_fwd(self, call: NormCall) -> NormOutputs:
        outputs = call.outputs(self.empty)
        _cpu.norm_fwd(call.readable(), **outputs._asdict(), num_threads=torch.get_num_threads())
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
        grads = call.gradients(self.empty, needs_weight, needs_bias)
        _cpu.norm_bwd(
            call.readable(),
            mean=mean,
            rstd=rstd,
            grad_out=rows_in_place(grad_out),
            grad_total=None if grad_total is None else rows_in_place(grad_total),
            grad_input=grads.input,
            grad_residual=grads.total,
            grad_weight=grads.weight,
            grad_bias=grads.bias,
            num_threads=torch.get_num_threads(),
        )
        return grads


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
    """The kinds of tiles that the kernels see in a mask; for tests and tools.

    Returns:
        (batch, num_heads, panels, blocks) uint8, 0 for tiles that are skipped, 1 for partial and
        2 for full ones; and the tile's size, in queries and keys.
    """
    panel, block = _cpu.tile_size(DTYPES[dtype])
    shape = (batch, num_heads, -(-seqlen_q // panel), -(-seqlen_k // block))
    kinds = torch.empty(shape, dtype=torch.uint8)
    empty = torch.empty(batch, num_heads, seqlen_q, 0, dtype=dtype)
    keys = torch.empty(batch, num_heads, seqlen_k, 0, dtype=dtype)
    call = AttentionCall(empty, keys, keys, spec, 1.0)
    _cpu.tile_kinds(call, kinds=kinds, num_threads=torch.get_num_threads())
    return kinds, (panel, block)


def _of_weights(
    call: AttentionCall, lse: Tensor, lse_low: Tensor
) -> tuple[AttentionCall, dict[str, Any]]:
    """A call without values, whose lse is known, and what it adds."""
    query, key = call.query, call.key
    call = replace(call, value=key.new_empty(*key.shape[:3], 0))
    out = query.new_empty(*query.shape[:3], 0)
    return call, {"out": out, "lse": lse.contiguous(), "lse_low": lse_low.contiguous()}


def _run_bwd(
    call: AttentionCall, fields: dict[str, Any], lse: Tensor, grad_bias: Tensor | None
) -> None:
    """Runs the backward; gradients of a float mask are added up in the type of lse."""
    sums = None if grad_bias is None else torch.zeros_like(grad_bias, dtype=lse.dtype)
    if sums is not None:
        fields = {**fields, "grad_bias": sums}
    _cpu.attention_bwd(call, **fields, num_threads=torch.get_num_threads())
    if grad_bias is not None and sums is not None:
        grad_bias.copy_(sums)
