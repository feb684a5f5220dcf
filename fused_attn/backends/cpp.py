"""Backend "cpp": C++ kernels for CPUs (csrc/cpu), in the compiled module `_cpu`.

The backend passes each call to the module, with the additional fields of the pass (csrc/fields).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends.base import ACTIVATIONS, Backend, Extent
from fused_attn.backends.fields import DTYPES, check_fields, empty_summary
from fused_attn.backends.problem import Problem, kernel_limits
from fused_attn.base.layout import contiguous, kernel_strides, laid_out_like
from fused_attn.base.threads import num_threads
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    UncheckedAttention,
    WeightsBackward,
)
from fused_attn.call.kv_cache import CacheUpdate
from fused_attn.call.norm import NormBackward, NormCall, NormGradients, NormOutputs, UncheckedNorm
from fused_attn.masks.spec import NO_MASK

try:
    from fused_attn import _cpu
except ImportError as error:  # pragma: no cover - a broken installation
    _cpu, _import_error = None, str(error)  # type: ignore[assignment]

# Capsule of C functions that read and allocate tensors; None before torch 2.10. Without it, small
# calls take longer, and torch allocates large outputs instead of the workspace pool.
_EXCHANGE_API = getattr(Tensor, "__dlpack_c_exchange_api__", None)
# Faster than os.environ.get, but torch.compile cannot trace it.
environment = os.environ.get if _cpu is None else _cpu.environment


_profiler_enabled = torch.autograd._profiler_enabled

_MASK64 = (1 << 64) - 1
# Largest number of new rows of a sequence that a decoding step writes. torch copies longer prompts
# on several threads, and without the GIL. With two threads, 64 to 1,024 rows take equally long.
_MAX_APPENDED = 64
_RESULTS = {**DTYPES, torch.int16: -1}  # out_residual is int16
_TYPES = {number: dtype for dtype, number in _RESULTS.items()} | {-2: torch.uint8}  # a summary


class CppBackend(Backend):
    """Backend of CPU kernels, compiled for each instruction set. The best supported one is used."""

    name = "cpp"
    accepts_unchecked = _cpu is not None

    def unavailable(self) -> list[str]:
        return [] if _cpu is not None else [f"fused_attn._cpu cannot be imported: {_import_error}"]

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        if problem.device.type != "cpu":
            reasons.append(f"runs on cpu, not on {problem.device.type}")
        return reasons + kernel_limits(problem, DTYPES)

    def default_for(self, device_type: str) -> Extent:
        return "all" if device_type == "cpu" and not self.unavailable() else "none"

    def empty(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Allocate an uninitialized tensor. Large tensors come from the workspace pool."""
        return _cpu.empty_tensor(shape, strides, _RESULTS[dtype])

    def tile_summary(self, tensor: Tensor) -> Tensor:
        summary = empty_summary(tensor, _cpu.SUMMARY_TILE)
        _cpu.tile_summary(tensor=tensor, summary=summary, num_threads=num_threads())
        return summary

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
            num_threads=num_threads(),
        )  # fmt: skip
        return out

    def rotary(
        self,
        input: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        per_dimension: bool,
        backward: bool,
    ) -> Tensor:
        out = self.empty(*laid_out_like(input, input.shape), input.dtype, input.device)
        _cpu.rotary(
            input, cos, sin, positions, interleaved, per_dimension, backward, out, num_threads()
        )
        return out

    def attention_fwd(
        self, call: AttentionCall | UncheckedAttention, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs | None:
        threads = num_threads()
        results = _run(_cpu.attention_fwd, call, for_backward, want_lse, threads)
        if results is None and isinstance(call, AttentionCall):
            call = call.kernel_layout()
            results = _run(_cpu.attention_fwd, call, for_backward, want_lse, threads)
        return None if results is None else AttentionOutputs._make(results)

    def attention_bwd(self, work: AttentionBackward) -> AttentionGradients | None:
        call, outputs, grad_out, grad_lse, _ = work
        results = _run(_cpu.attention_bwd, *work, num_threads())
        if results is None:
            if grad_lse is not None:
                grad_lse = grad_lse.to(outputs.lse.dtype).contiguous().resolve_neg()
            work = work._replace(
                call=call.kernel_layout(),
                outputs=outputs.kernel_layout(),
                grad_out=kernel_strides(grad_out),
                grad_lse=grad_lse,
            )
            results = _run(_cpu.attention_bwd, *work, num_threads())
        if results is None:
            return None
        query, key, value, bias = results
        if bias is not None and not call.options.partial:
            assert call.mask.bias is not None
            bias = bias.to(call.mask.bias.dtype)
        return AttentionGradients(query, key, value, bias)

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        weights = call.weights(average, self.empty)
        call, fields = _weights_fields(call, lse, lse_residual)
        threads = num_threads()
        _cpu.attention_weights(
            call, **fields, weights=weights, average=average, num_threads=threads
        )
        return weights

    def attention_weights_bwd(self, work: WeightsBackward) -> tuple[Tensor, Tensor, Tensor]:
        call, lse, lse_residual, grad_weights, average, needs_bias = work
        grads = call.gradients(needs_bias, self.empty)
        grad_weights, num_heads = kernel_strides(grad_weights), call.query.shape[1]
        if average:
            grad_weights = grad_weights[:, None].expand(-1, num_heads, -1, -1)
        call, fields = _weights_fields(call, lse, lse_residual)
        if needs_bias:  # accumulated in the dtype of lse
            fields["grad_bias"] = torch.zeros_like(grads.bias, dtype=lse.dtype)
        _cpu.attention_weights_bwd(
            call, **fields, grad_query=grads.query, grad_key=grads.key, grad_weights=grad_weights,
            grad_weights_factor=1.0 / max(num_heads, 1) if average else 1.0,
            row_sums=torch.empty_like(lse), num_threads=num_threads(),
        )  # fmt: skip
        if needs_bias:
            grads.bias.copy_(fields["grad_bias"])
        return grads.query, grads.key, grads.bias

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate, want_lse: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Implement `Backend.attention_decode`. Pages are read in place for up to 4 queries."""
        key, value, table = update.key, update.value, update.block_table
        if key is not None and value is not None:
            if update.seqlen_new > _MAX_APPENDED:
                return None
            key, value = kernel_strides(key), kernel_strides(value)
        lengths = update.lengths.tolist() if isinstance(update.lengths, Tensor) else update.lengths
        ends = tuple([length + update.seqlen_new for length in lengths])
        return _run(
            _cpu.attention_decode, call, None if table is None else table.resolve_neg(),
            update.capacity, ends, key, value, want_lse, num_threads(),
        )  # fmt: skip

    def norm_fwd(
        self, call: NormCall | UncheckedNorm, for_backward: bool, want_total: bool
    ) -> NormOutputs | None:
        threads = num_threads()
        results = _run(_cpu.norm_fwd, call, for_backward, want_total, threads)
        if results is None and isinstance(call, NormCall):
            if call.input.numel() == 0:
                outputs = call.outputs()
                return outputs._replace(mean=outputs.mean.zero_(), rstd=outputs.rstd.zero_())
            results = _run(_cpu.norm_fwd, call.contiguous_call(), for_backward, want_total, threads)
        return None if results is None else NormOutputs._make(results)

    def norm_bwd(self, work: NormBackward) -> NormGradients | None:
        results = _run(_cpu.norm_bwd, *work, num_threads())
        if results is None:
            call, grad_total = work.call, work.grad_total
            if call.input.numel() == 0:
                grads = call.gradients(work.needs_weight, work.needs_bias)
                return grads._replace(weight=grads.weight.zero_(), bias=grads.bias.zero_())
            work = work._replace(
                call=call.contiguous_call(),
                grad_out=work.grad_out.contiguous(),
                grad_total=None if grad_total is None else grad_total.contiguous(),
            )
            results = _run(_cpu.norm_bwd, *work, num_threads())
        return None if results is None else NormGradients._make(results)


def _run(function: Any, *args: Any) -> Any:
    """Call a function of the module, within a profiler event if the profiler is enabled.

    The event is named fused_attn::cpp::<function>. The ops of torch.library have separate events,
    whose names do not contain `cpp`.
    """
    if not _profiler_enabled():
        return function(*args)
    with torch.autograd.profiler.record_function(f"fused_attn::cpp::{function.__name__}"):
        return function(*args)


def isa() -> str:
    """Return the name of the instruction set in use, as listed in csrc/cpu/isas.inc."""
    return _cpu.isa()


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: int) -> Tensor:
    """Allocate an uninitialized tensor. The module calls this if torch has no C API for it."""
    return torch.empty_strided(shape, strides, dtype=_TYPES[dtype])


def _weights_fields(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor
) -> tuple[AttentionCall, dict[str, Any]]:
    """Return the call with an empty value, and the fields out, lse and lse_residual."""
    call = call.without_value().kernel_layout()
    out = call.query.new_empty(*call.query.shape[:3], 0)
    return call, {"out": out, "lse": lse.contiguous(), "lse_residual": lse_residual.contiguous()}


if _cpu is not None:
    check_fields(_cpu.FIELDS)
    _cpu.set_torch(_EXCHANGE_API, _empty)
    _cpu.set_no_mask(NO_MASK)
