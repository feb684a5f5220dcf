"""Dispatch of attention and norm calls: validation, selection of a backend, and gradients.

A backend with accepts_unchecked may run a call without validation. Other calls are validated, and
run on the backend that `select` returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import Backend, problem_of, select
from fused_attn.backends.registry import backend_for_unchecked
from fused_attn.base.torch_state import is_compiling, is_intercepted, needs_grad
from fused_attn.call.attention import AttentionCall, UncheckedAttention
from fused_attn.call.call_counts import counting
from fused_attn.call.handlers import (
    check_no_dtensors,
    dtensors,
    handler_of,
    is_dtensor,
    tensors_of,
)
from fused_attn.call.norm import NormCall, UncheckedNorm
from fused_attn.call.options import with_options
from fused_attn.call.validation import checked_attention, checked_norm
from fused_attn.masks.spec import MaskSpec, with_summaries
from fused_attn.ops import autograd, library
from fused_attn.ops.seeds import new_seed
from fused_attn.ops.sinks import add_sinks, checked_sinks


def attention(
    call: UncheckedAttention, want_lse: bool, named: str | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run an unchecked attention call, with validation only if the backend requires it.

    Args:
        named: name of the backend that the caller requested, or None.
        sinks: (num_heads,) or None; see ops/sinks.py.

    Returns:
        out and lse, in the caller's shapes. lse may be None without want_lse.

    Raises:
        ValueError, TypeError: an argument is invalid.
        NotImplementedError: the named backend does not support the call.
    """
    if sinks is not None:
        out, lse = attention(call, True, named)
        assert lse is not None
        logits = dtensors().sinks_like(lse, sinks) if is_dtensor(lse) else sinks
        return add_sinks(out, lse, checked_sinks(logits, lse), packed=call.is_packed)
    handler = handler_of(call.query)
    if handler is not None:
        return handler.attention(call, want_lse, named)
    results = _try_unchecked(call, want_lse, named) if not is_intercepted() else None
    if results is not None:
        return results
    check_no_dtensors("query", call.query, key=call.key, value=call.value)
    for tensor in tensors_of(call.attn_mask):
        check_no_dtensors("query", call.query, attn_mask=tensor)
    checked, leading = checked_attention(call)
    out, lse = select_and_run_attention(call, checked, want_lse, named)
    return in_shape(out, lse, leading)


def select_and_run_attention(
    call: UncheckedAttention, checked: AttentionCall, want_lse: bool, named: str | None
) -> tuple[Tensor, Tensor | None]:
    """Run a validated call on the backend that `select` returns, and count the original call."""
    backend = select(problem_of(checked, "lse" if want_lse else "out"), named)
    if counting and not is_compiling():
        _count(backend, call.query, call.key, call.attn_mask)
    out, lse = run_attention(checked, backend, want_lse)
    return out, lse if want_lse else None


def in_shape(
    out: Tensor, lse: Tensor | None, leading: tuple[int, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the results of a validated call in the caller's shapes; see `checked_attention`."""
    if leading is None:  # the sequences are packed
        return out[0].transpose(0, 1), None if lse is None else lse[0]
    if len(leading) == 3:
        return out, lse
    return out.reshape(*leading, out.shape[-1]), None if lse is None else lse.reshape(leading)


def _count(backend: Backend, query: Tensor, key: Tensor, mask: object) -> None:
    """Count a call in all open `stats()` blocks."""
    reason = f"backend {backend.name}" if backend.differentiable else ""
    if isinstance(mask, MaskSpec) and mask.cu_seqlens_q is not None and key.dim() == 3:
        key = key.transpose(0, 1)  # (num_heads_kv, total_k, head_dim)
    for counts in counting:
        counts.add(reason, query, key)


def _try_unchecked(
    call: UncheckedAttention, want_lse: bool, named: str | None
) -> tuple[Tensor, Tensor | None] | None:
    """Run an unchecked call and return out and lse; return None if it needs validation."""
    backend = backend_for_unchecked(call, call.query.device, named) if call.prepare() else None
    if backend is None:
        return None
    trains = False
    if not backend.differentiable:
        spec = call.resolve_mask()
        if spec is None:
            return None
        # Inlined here and in `_try_unchecked_norm`, because needs_grad() takes 0.3 us longer.
        trains = torch.is_grad_enabled() and (
            call.query.requires_grad
            or call.key.requires_grad
            or call.value.requires_grad
            or (spec.bias is not None and spec.bias.requires_grad)
        )
    packed = trains and call.is_packed
    batched = call.with_batch() if packed else call
    outputs = backend.attention_fwd(batched, trains, want_lse)
    if outputs is None:
        return None
    if counting:
        _count(backend, call.query, call.key, call.attn_mask)
    if not trains:
        return outputs.out, outputs.lse
    out, lse = autograd.attention(batched.assume_checked(), backend, outputs, want_lse)
    return in_shape(out, lse, None) if packed else (out, lse)


def run_attention(
    call: AttentionCall, backend: Backend, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a validated call on a backend; return out and lse, which may be None without want_lse."""
    call = _seeded(call, backend)
    if backend.differentiable:
        outputs = backend.attention_fwd(call, False, want_lse)
        assert outputs is not None  # backends cannot reject validated calls
        return outputs[:2]
    if not needs_grad(*call.tensors()):
        return library.attention_fwd(call, backend, False, want_lse)[:2]
    with_summaries(call.mask, backend.tile_summary)  # saved with the call, for the backward
    return autograd.attention(call, backend, None, want_lse)


def attention_with_weights(
    call: UncheckedAttention, average: bool, named: str | None
) -> tuple[Tensor, Tensor]:
    """Validate and run a call; return out and its attention weights."""
    handler = handler_of(call.query)
    if handler is not None:
        return handler.attention_with_weights(call, average, named)
    return run_weights(checked_attention(call)[0], average, named)


def run_weights(call: AttentionCall, average: bool, named: str | None) -> tuple[Tensor, Tensor]:
    """Run a validated call; return out, and its attention weights (see `AttentionCall.weights`)."""
    backend = select(problem_of(call, "weights"), named)
    if counting and not is_compiling():
        _count(backend, call.query, call.key, call.mask)
    call = _seeded(call, backend)
    if backend.differentiable:
        return backend.attention_with_weights(call, average)
    trains = needs_grad(*call.tensors())
    if trains:
        with_summaries(call.mask, backend.tile_summary)
        out, lse, lse_residual = autograd.attention_for_weights(call, backend)
    else:
        out, lse, lse_residual, _ = library.attention_fwd(call, backend, True, True)
    # Detach lse: the gradient of the weights with respect to query, key and bias already includes
    # the path through lse.
    lse = lse.detach()
    if trains:
        return out, autograd.weights(call, lse, lse_residual, average, backend)
    return out, library.attention_weights(call, lse, lse_residual, average, backend)


def norm(call: UncheckedNorm, want_total: bool, named: str | None) -> tuple[Tensor, Tensor | None]:
    """Run an unchecked norm call; return out and the sum residual + dropout(input).

    The sum may be None without want_total. For `named`, see `attention`.
    """
    results = _try_unchecked_norm(call, want_total, named) if not is_intercepted() else None
    if results is not None:
        return results
    if is_dtensor(call.input):
        out, total = dtensors().norm(call, want_total, named)
        return out, total
    check_no_dtensors(
        "input", call.input, weight=call.weight, bias=call.bias, residual=call.residual
    )
    out, total = run_norm(checked_norm(call), want_total, named)
    return norm_in_shape(out, total, call.input.shape)


def norm_in_shape(
    out: Tensor, total: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor | None]:
    """Return the results of a validated norm call in the shape of the caller's input."""
    if out.shape == shape:
        return out, total
    return out.reshape(shape), None if total is None else total.reshape(shape)


def _try_unchecked_norm(
    call: UncheckedNorm, want_total: bool, named: str | None
) -> tuple[Tensor, Tensor | None] | None:
    """Run an unchecked norm call; return the results of `norm`, or None if it needs validation."""
    backend = backend_for_unchecked(call, call.input.device, named) if call.prepare() else None
    if backend is None:
        return None
    trains = (
        not backend.differentiable
        and torch.is_grad_enabled()
        and (
            call.input.requires_grad
            or (call.weight is not None and call.weight.requires_grad)
            or (call.bias is not None and call.bias.requires_grad)
            or (call.residual is not None and call.residual.requires_grad)
        )
    )
    if trains and len(call.normalized_shape) != 1:
        return None  # the backward supports only one normalized dimension
    input = call.input
    if not input.is_nested and input.dim() > 0 and input.stride(-1) != 1:
        call.input = input.contiguous()
    outputs = backend.norm_fwd(call, trains, want_total)
    if outputs is None:
        return None
    if trains:
        out, total = autograd.norm(call.assume_checked(), backend, outputs)
    else:
        out, total = outputs[:2]
    return out, total if call.has_total else call.input


def run_norm(call: NormCall, want_total: bool, named: str | None) -> tuple[Tensor, Tensor | None]:
    """Run a validated norm call; return out and the sum, as `norm` does."""
    backend = select(problem_of(call), named)
    call = _seeded(call, backend)
    if backend.differentiable:
        outputs = backend.norm_fwd(call, False, want_total)
        assert outputs is not None  # backends cannot reject validated calls
        out, total = outputs[:2]
    elif needs_grad(*call.tensors()):
        out, total = autograd.norm(call, backend, None)
    else:
        out, total = library.norm_fwd(call, backend, False, want_total)[:2]
    return out, total if call.has_total else call.input


def _seeded(call: Any, backend: Backend) -> Any:
    """Return the call, with a new dropout seed if it has dropout and no seed."""
    options = call.options
    if options.dropout_p == 0.0 or options.seed is not None or backend.wraps_torch:
        return call
    return with_options(call, seed=new_seed(call.tensors()[0].device))
