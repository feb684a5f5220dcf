"""The registered ops (torch.library): schemas, checks, fakes, FLOP formulas.

Plain eager calls go straight to the backend; everything that watches calls (torch.compile,
export, FakeTensor, selective checkpointing, DTensor) sees the ops, which take the same calls flat.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fused_attn.backends import Backend, get_backend
from fused_attn.core.call import (
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    NormCall,
    NormGradients,
    NormOutputs,
)
from fused_attn.core.flat import Flat, empty_strided
from fused_attn.core.layout import readable_in_place
from fused_attn.core.packed import check_cu_seqlens
from fused_attn.core.torch_state import plain_eager
from fused_attn.masks.spec import BOUNDS

# ---- the way in ---------------------------------------------------------------------------------


def attention_fwd(call: AttentionCall, backend: Backend, for_backward: bool) -> AttentionOutputs:
    """The outputs. Where no backward follows, backends have faster ways for a few queries."""
    if plain_eager(*call.tensors()):
        return backend.attention_fwd(call, for_backward)
    results = torch.ops.fused_attn.attention_fwd(*call.flat(), for_backward, backend.name)
    return AttentionOutputs(*results)


def attention_bwd(
    call: AttentionCall,
    outputs: AttentionOutputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_bias: bool,
    backend: Backend,
) -> AttentionGradients:
    """The gradients under grad_out and grad_lse."""
    if plain_eager(grad_out, *call.tensors()):
        return backend.attention_bwd(call, outputs, grad_out, grad_lse, needs_bias)
    rest = (*outputs, grad_out, grad_lse, needs_bias, backend.name)
    return AttentionGradients(*torch.ops.fused_attn.attention_bwd(*call.flat(), *rest))


def attention_weights(
    call: AttentionCall, lse: Tensor, lse_low: Tensor, average: bool, backend: Backend
) -> Tensor:
    """The weights after dropout, from the lse of `attention_fwd`."""
    if plain_eager(*call.tensors(), lse):
        return backend.attention_weights(call, lse, lse_low, average)
    rest = (lse, lse_low, average, backend.name)
    return torch.ops.fused_attn.attention_weights(*call.flat(), *rest)


def attention_weights_bwd(
    call: AttentionCall,
    lse: Tensor,
    lse_low: Tensor,
    grad_weights: Tensor,
    average: bool,
    needs_bias: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and bias (empty if not needed) by `attention_weights`."""
    args = (lse, lse_low, grad_weights, average, needs_bias)
    if plain_eager(*call.tensors(), grad_weights):
        return backend.attention_weights_bwd(call, *args)
    return torch.ops.fused_attn.attention_weights_bwd(*call.flat(), *args, backend.name)


def norm_fwd(call: NormCall, backend: Backend) -> NormOutputs:
    """The outputs."""
    if plain_eager(*call.tensors()):
        return backend.norm_fwd(call)
    return NormOutputs(*torch.ops.fused_attn.norm_fwd(*call.flat(), backend.name))


def norm_bwd(
    call: NormCall,
    mean: Tensor,
    rstd: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
    backend: Backend,
) -> NormGradients:
    """The gradients; `call` has the sum that was normalised as its input, and no residual."""
    needs = (needs_weight, needs_bias)
    if plain_eager(grad_out, grad_total, *call.tensors()):
        return backend.norm_bwd(call, mean, rstd, *_resolved(grad_out, grad_total), *needs)
    args = (mean, rstd, grad_out, grad_total, *needs, backend.name)
    return NormGradients(*torch.ops.fused_attn.norm_bwd(*call.flat(), *args))


def _resolved(grad_out: Tensor, grad_total: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients without torch's lazy negation."""
    return grad_out.resolve_neg(), None if grad_total is None else grad_total.resolve_neg()


# ---- what the ops do ----------------------------------------------------------------------------


def _run_attention_fwd(call: AttentionCall, for_backward: bool, backend: str) -> Any:
    _check_attention(call)
    return get_backend(backend).attention_fwd(call.readable(), for_backward)


def _run_attention_bwd(
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_bias: bool,
    backend: str,
) -> Any:
    _check_attention(call)
    rows = call.query.shape[:3]
    shape = (*rows, call.value.shape[3])
    if grad_out.shape != shape or out.shape != shape:
        raise ValueError(f"out and grad_out must have shape {shape}")
    if any(t is not None and t.shape != rows for t in (grad_lse, lse, lse_low)):
        raise ValueError(f"lse and its gradient must have shape {tuple(rows)}")
    outputs = AttentionOutputs(readable_in_place(out), lse.contiguous(), lse_low.contiguous())
    rest = (outputs, grad_out, grad_lse, needs_bias)
    return get_backend(backend).attention_bwd(call.readable(), *rest)


def _run_attention_weights(
    call: AttentionCall, lse: Tensor, lse_low: Tensor, average: bool, backend: str
) -> Any:
    _check_weights(call, lse, lse_low)
    return get_backend(backend).attention_weights(call.readable(), lse, lse_low, average)


def _run_attention_weights_bwd(
    call: AttentionCall,
    lse: Tensor,
    lse_low: Tensor,
    grad_weights: Tensor,
    average: bool,
    needs_bias: bool,
    backend: str,
) -> Any:
    _check_weights(call, lse, lse_low)
    if grad_weights.shape != call.weights_shape(average):
        raise ValueError(f"grad_weights must have shape {call.weights_shape(average)}")
    args = (lse, lse_low, grad_weights, average, needs_bias)
    return get_backend(backend).attention_weights_bwd(call.readable(), *args)


def _run_norm_fwd(call: NormCall, backend: str) -> Any:
    input, residual = call.input, call.residual
    if input.dim() != 2 or (residual is not None and residual.shape != input.shape):
        raise ValueError("input and residual must have shape (rows, columns)")
    if any(t is not None and t.shape != input.shape[1:] for t in (call.weight, call.bias)):
        raise ValueError("weight and bias must have shape (columns,)")
    _check_seed(call)
    return get_backend(backend).norm_fwd(call)


def _run_norm_bwd(
    call: NormCall,
    mean: Tensor,
    rstd: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
    backend: str,
) -> Any:
    total, weight = call.input, call.weight
    if total.dim() != 2 or any(
        t is not None and t.shape != total.shape for t in (grad_out, grad_total)
    ):
        raise ValueError("total and the gradients must have shape (rows, columns)")
    statistics = (rstd,) if call.rms else (mean, rstd)
    if any(t.shape != total.shape[:1] for t in statistics) or (
        weight is not None and weight.shape != total.shape[1:]
    ):
        raise ValueError("mean and rstd must have shape (rows,), weight (columns,)")
    _check_seed(call)
    mean, rstd, grads = mean.contiguous(), rstd.contiguous(), _resolved(grad_out, grad_total)
    return get_backend(backend).norm_bwd(call, mean, rstd, *grads, needs_weight, needs_bias)


# What `functional` makes sure of, for those who call torch.ops.fused_attn directly.


def _check_attention(call: AttentionCall) -> None:
    query, key, value, spec = call.query, call.key, call.value, call.mask
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError("query, key and value must have 4 dimensions")
    num_heads, num_heads_kv, head_dim = query.shape[1], key.shape[1], query.shape[3]
    if (
        key.shape[0] != query.shape[0]
        or key.shape[3] != head_dim
        or value.shape[:3] != key.shape[:3]
    ):
        got = [tuple(t.shape) for t in (query, key, value)]
        raise ValueError(f"query, key and value must fit together, got {got}")
    if num_heads and (num_heads_kv == 0 or num_heads % num_heads_kv):
        raise ValueError(f"key must have num_heads_kv that divides {num_heads}, got {num_heads_kv}")
    batch, seqlen_q, seqlen_k = call.sizes()
    if spec.cu_seqlens_q is not None:
        if query.shape[0] != 1 or spec.cu_seqlens_k is None or spec.bounds is None:
            raise ValueError("packed sequences must have one batch, cu_seqlens_k and bounds")
        check_cu_seqlens("cu_seqlens_q", spec.cu_seqlens_q, seqlen_q, query.shape[2])
        check_cu_seqlens("cu_seqlens_k", spec.cu_seqlens_k, seqlen_k, key.shape[2])
        if spec.cu_seqlens_k.shape[0] != batch + 1:
            raise ValueError(f"cu_seqlens_k must have shape ({batch + 1},)")
    full = (batch, num_heads, seqlen_q, seqlen_k)
    for name, shape, broadcast in (  # the first so many dimensions may be 1
        ("bias", full, 4),
        ("dense", full, 4),
        ("key_mask", (batch, num_heads, 1, seqlen_k), 4),
        ("bounds", (batch, len(BOUNDS)), 0),
        ("query_documents", (batch, seqlen_q), 1),
        ("key_documents", (batch, seqlen_k), 1),
        ("slopes", (batch, num_heads), 1),
    ):
        tensor = getattr(spec, name)
        if tensor is not None and (
            tensor.dim() != len(shape)
            or tuple(tensor.shape[broadcast:]) != shape[broadcast:]
            or any(tensor.shape[i] not in (1, shape[i]) for i in range(broadcast))
        ):
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    _check_seed(call)


def _check_weights(call: AttentionCall, lse: Tensor, lse_low: Tensor) -> None:
    if call.mask.cu_seqlens_q is not None or call.mask.cu_seqlens_k is not None:
        raise ValueError("packed sequences have no weights: pad them")
    _check_attention(call)
    if any(t.shape != call.query.shape[:3] for t in (lse, lse_low)):
        raise ValueError(f"lse and lse_low must have shape {tuple(call.query.shape[:3])}")


def _check_seed(call: AttentionCall | NormCall) -> None:
    if call.dropout_p > 0.0 and call.seed is None:
        raise ValueError("seed must be given with dropout_p > 0")


# ---- fakes --------------------------------------------------------------------------------------


def _fake_attention_fwd(call: AttentionCall, for_backward: bool, backend: str) -> Any:
    return call.outputs(empty_strided, for_backward)


def _fake_attention_bwd(call: AttentionCall, *rest: Any) -> Any:
    return call.gradients(empty_strided, needs_bias=rest[-2])


def _fake_attention_weights(call: AttentionCall, *rest: Any) -> Any:
    return call.weights(empty_strided, average=rest[-2])


def _fake_attention_weights_bwd(call: AttentionCall, *rest: Any) -> Any:
    query, key, _, bias = call.gradients(empty_strided, needs_bias=rest[-2])
    return query, key, bias


def _fake_norm_fwd(call: NormCall, backend: str) -> Any:
    return call.outputs(empty_strided)


def _fake_norm_bwd(call: NormCall, *rest: Any) -> Any:
    return call.gradients(empty_strided, needs_weight=rest[-3], needs_bias=rest[-2])


# ---- registration -------------------------------------------------------------------------------

_library = torch.library.Library("fused_attn", "DEF")


def _register(name: str, call: type[Flat], parameters: str, returns: str) -> None:
    """Defines an op, whose parameters are those of a call, then `parameters`, then the backend.

    What it does, _run_<name> and _fake_<name>, takes the call whole.
    """
    run, fake, size = globals()[f"_run_{name}"], globals()[f"_fake_{name}"], len(call.NAMES)

    def unflatten(function: Any) -> Any:
        def of_flat(*values: Any) -> Any:
            results = function(call.of_flat(values), *values[size:])
            return results if isinstance(results, Tensor) else tuple(results)

        return of_flat

    _library.define(f"{name}({call.SCHEMA}, {parameters}str backend) -> {returns}")
    _library.impl(name, unflatten(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fused_attn::{name}", unflatten(fake), lib=_library)


_register(
    "attention_fwd",
    AttentionCall,
    "bool for_backward, ",
    "(Tensor out, Tensor lse, Tensor lse_low)",
)
_register(
    "attention_bwd",
    AttentionCall,
    "Tensor out, Tensor lse, Tensor lse_low, Tensor grad_out, Tensor? grad_lse, bool needs_bias, ",
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)",
)
_register(
    "attention_weights",
    AttentionCall,
    "Tensor lse, Tensor lse_low, bool average, ",
    "Tensor",
)
_register(
    "attention_weights_bwd",
    AttentionCall,
    "Tensor lse, Tensor lse_low, Tensor grad_weights, bool average, bool needs_bias, ",
    "(Tensor grad_query, Tensor grad_key, Tensor grad_bias)",
)
_register(
    "norm_fwd",
    NormCall,
    "",
    "(Tensor out, Tensor total, Tensor mean, Tensor rstd)",
)
_register(
    "norm_bwd",
    NormCall,
    "Tensor mean, Tensor rstd, Tensor grad_out, Tensor? grad_total, bool needs_weight, "
    "bool needs_bias, ",
    "(Tensor grad_input, Tensor grad_total_sum, Tensor grad_weight, Tensor grad_bias)",
)


# ---- FLOP formulas ------------------------------------------------------------------------------


def _products(shapes: tuple[Any, ...]) -> tuple[int, int]:
    """Multiply-adds times two of one query @ key^T and one weights @ value, of a flat call.

    The count of the unmasked problem, as torch's formulas for attention have it; of packed
    sequences as if all keys' sequences were as long as the longest.
    """
    query, key, value = shapes[:3]
    seqlen_k = shapes[AttentionCall.NAMES.index("max_seqlen_k")] or key[-2]
    rows = 2 * math.prod(query[:-1]) * seqlen_k
    return rows * query[-1], rows * value[-1]


@register_flop_formula(torch.ops.fused_attn.attention_fwd)
def _attention_fwd_flops(*shapes: Any, **kwargs: Any) -> int:
    return sum(_products(shapes))


@register_flop_formula(torch.ops.fused_attn.attention_bwd)
def _attention_bwd_flops(*shapes: Any, **kwargs: Any) -> int:
    scores, output = _products(shapes)
    return 3 * scores + 2 * output


@register_flop_formula(torch.ops.fused_attn.attention_weights)
def _attention_weights_flops(*shapes: Any, **kwargs: Any) -> int:
    return _products(shapes)[0]


@register_flop_formula(torch.ops.fused_attn.attention_weights_bwd)
def _attention_weights_bwd_flops(*shapes: Any, **kwargs: Any) -> int:
    return 3 * _products(shapes)[0]
