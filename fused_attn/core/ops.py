"""The registered ops (torch.library): schemas, fakes, autocast, FLOP formulas.

Plain eager calls go straight to the backend; everything that watches calls (torch.compile,
export, FakeTensor, selective checkpointing, DTensor) sees the ops.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fused_attn.backends import get_backend
from fused_attn.core.layout import gradient_layout, out_layout
from fused_attn.core.packed import check_cu_seqlens
from fused_attn.core.torch_state import plain_eager, statistics_dtype
from fused_attn.masks.spec import BOUNDS, NUM_SPEC_FIELDS, MaskSpec

# The fields of MaskSpec in their order.
_MASK = (
    "Tensor? bias, Tensor? bias_summary, Tensor? dense, Tensor? dense_summary, Tensor? key_mask, "
    "Tensor? bounds, Tensor? query_documents, Tensor? key_documents, Tensor? slopes, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt band_lo, SymInt band_hi, "
    "SymInt alibi_offset, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_ATTENTION = f"{_MASK}, float scale, float softcap, float dropout_p, Tensor? seed"
_QKV = "Tensor query, Tensor key, Tensor value"

SCHEMAS = {
    "attention_fwd": (
        f"({_QKV}, {_ATTENTION}, str backend, bool for_backward) "
        "-> (Tensor out, Tensor lse, Tensor lse_low)"
    ),
    "attention_bwd": (
        f"(Tensor grad_out, Tensor? grad_lse, {_QKV}, Tensor out, Tensor lse, Tensor lse_low, "
        f"{_ATTENTION}, bool needs_bias, str backend) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)"
    ),
    "attention_weights": (
        f"(Tensor query, Tensor key, Tensor lse, Tensor lse_low, {_ATTENTION}, bool average, "
        "str backend) -> Tensor"
    ),
    "attention_weights_bwd": (
        f"(Tensor grad_weights, Tensor query, Tensor key, Tensor lse, Tensor lse_low, "
        f"{_ATTENTION}, bool average, bool needs_bias, str backend) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_bias)"
    ),
    "norm_fwd": (
        "(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool rms, "
        "float dropout_p, Tensor? seed, str backend) "
        "-> (Tensor out, Tensor total, Tensor mean, Tensor rstd)"
    ),
    "norm_bwd": (
        "(Tensor grad_out, Tensor? grad_total, Tensor total, Tensor? weight, Tensor mean, "
        "Tensor rstd, bool rms, float dropout_p, Tensor? seed, bool needs_weight, bool needs_bias, "
        "str backend) "
        "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)"
    ),
}


# ---- what the ops do ----------------------------------------------------------------------------


def _check_operands(query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> None:
    """What `functional` makes sure of, for those who call torch.ops.fused_attn directly."""
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
    batch, seqlen_q, seqlen_k = spec.sizes(query, key)
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


def _attention_fwd_op(*args: Any) -> Any:
    query, key, value = args[:3]
    _check_operands(query, key, value, MaskSpec(*args[3 : 3 + NUM_SPEC_FIELDS]))
    dropout_p, seed = args[-4:-2]
    if dropout_p > 0.0 and seed is None:
        raise ValueError("seed must be given with dropout_p > 0")
    return _attention_fwd_impl(*args)


def _attention_bwd_op(*args: Any) -> Any:
    grad_out, grad_lse, query, key, value, out, lse, lse_low = args[:8]
    _check_operands(query, key, value, MaskSpec(*args[8 : 8 + NUM_SPEC_FIELDS]))
    shape = (*query.shape[:3], value.shape[3])
    if grad_out.shape != shape or out.shape != shape:
        raise ValueError(f"out and grad_out must have shape {shape}")
    if any(t is not None and t.shape != query.shape[:3] for t in (grad_lse, lse, lse_low)):
        raise ValueError(f"lse and its gradient must have shape {tuple(query.shape[:3])}")
    dropout_p, seed = args[-4:-2]
    if dropout_p > 0.0 and seed is None:
        raise ValueError("seed must be given with dropout_p > 0")
    return _attention_bwd_impl(*args)


def _attention_weights_op(*args: Any) -> Any:
    query, key, lse, lse_low = args[:4]
    _check_weights(query, key, lse, lse_low, args[4:-2])
    return _attention_weights_impl(*args)


def _attention_weights_bwd_op(*args: Any) -> Any:
    grad_weights, query, key, lse, lse_low = args[:5]
    average = args[-3]
    _check_weights(query, key, lse, lse_low, args[5:-3])
    if grad_weights.shape != _weights_shape(query, key, average):
        raise ValueError(f"grad_weights must have shape {_weights_shape(query, key, average)}")
    return _attention_weights_bwd_impl(*args)


def _check_weights(
    query: Tensor, key: Tensor, lse: Tensor, lse_low: Tensor, options: tuple[Any, ...]
) -> None:
    spec = MaskSpec(*options[:NUM_SPEC_FIELDS])
    if spec.cu_seqlens_q is not None or spec.cu_seqlens_k is not None:
        raise ValueError("packed sequences have no weights: pad them")
    _check_operands(query, key, key, spec)
    if any(t.shape != query.shape[:3] for t in (lse, lse_low)):
        raise ValueError(f"lse and lse_low must have shape {tuple(query.shape[:3])}")
    if options[-2] > 0.0 and options[-1] is None:
        raise ValueError("seed must be given with dropout_p > 0")


def _weights_shape(query: Tensor, key: Tensor, average: bool) -> tuple[int, ...]:
    batch, num_heads, seqlen_q, _ = query.shape
    heads = () if average else (num_heads,)
    return (batch, *heads, seqlen_q, key.shape[2])


def _attention_fwd_impl(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    *options, backend, for_backward = rest
    spec = MaskSpec(*options[:NUM_SPEC_FIELDS])
    return get_backend(backend).attention_fwd(
        query, key, value, spec, *options[NUM_SPEC_FIELDS:], for_backward
    )


def _attention_bwd_impl(*args: Any) -> Any:
    tensors, options, (needs_bias, backend) = args[:8], args[8:-2], args[-2:]
    spec = MaskSpec(*options[:NUM_SPEC_FIELDS])
    return get_backend(backend).attention_bwd(
        *tensors, spec, *options[NUM_SPEC_FIELDS:], needs_bias
    )


def _attention_weights_impl(*args: Any) -> Any:
    tensors, options, (average, backend) = args[:4], args[4:-2], args[-2:]
    spec = MaskSpec(*options[:NUM_SPEC_FIELDS])
    return get_backend(backend).attention_weights(
        *tensors, spec, *options[NUM_SPEC_FIELDS:], average
    )


def _attention_weights_bwd_impl(*args: Any) -> Any:
    tensors, options, (*flags, backend) = args[:5], args[5:-3], args[-3:]
    spec = MaskSpec(*options[:NUM_SPEC_FIELDS])
    return get_backend(backend).attention_weights_bwd(
        *tensors, spec, *options[NUM_SPEC_FIELDS:], *flags
    )


def _norm_fwd_impl(*args: Any) -> Any:
    return get_backend(args[-1]).norm_fwd(*args[:-1])


def _norm_bwd_impl(grad_out: Tensor, grad_total: Tensor | None, *args: Any) -> Any:
    grad_total = None if grad_total is None else grad_total.resolve_neg()
    return get_backend(args[-1]).norm_bwd(grad_out.resolve_neg(), grad_total, *args[:-1])


def _norm_fwd_op(*args: Any) -> Any:
    input, residual, weight, bias = args[:4]
    if input.dim() != 2 or (residual is not None and residual.shape != input.shape):
        raise ValueError("input and residual must have shape (rows, columns)")
    if any(t is not None and t.shape != input.shape[1:] for t in (weight, bias)):
        raise ValueError("weight and bias must have shape (columns,)")
    return _norm_fwd_impl(*args)


def _norm_bwd_op(*args: Any) -> Any:
    grad_out, grad_total, total, weight, mean, rstd, rms = args[:7]
    if total.dim() != 2 or any(
        t is not None and t.shape != total.shape for t in (grad_out, grad_total)
    ):
        raise ValueError("total and the gradients must have shape (rows, columns)")
    statistics = (rstd,) if rms else (mean, rstd)
    if any(t.shape != total.shape[:1] for t in statistics) or (
        weight is not None and weight.shape != total.shape[1:]
    ):
        raise ValueError("mean and rstd must have shape (rows,), weight (columns,)")
    return _norm_bwd_impl(*args)


# ---- the way in ---------------------------------------------------------------------------------


def attention_fwd(*args: Any) -> Any:
    """out, lse, and what rounding took from lse (empty unless for_backward); arguments as in the
    schema. Where no backward follows, backends have faster ways for a few queries."""
    if plain_eager(*args[:4]):
        return _attention_fwd_impl(*args)
    return torch.ops.fused_attn.attention_fwd(*args)


def attention_bwd(*args: Any) -> Any:
    """Gradients of query, key, value and bias (empty if not needed); arguments as in the schema."""
    if plain_eager(args[0], *args[2:5]):
        return _attention_bwd_impl(*args)
    return torch.ops.fused_attn.attention_bwd(*args)


def attention_weights(*args: Any) -> Any:
    """The weights of attention_fwd, after dropout; arguments as in the schema."""
    if plain_eager(*args[:5]):
        return _attention_weights_impl(*args)
    return torch.ops.fused_attn.attention_weights(*args)


def attention_weights_bwd(*args: Any) -> Any:
    """Gradients of query, key and bias (empty if not needed); arguments as in the schema."""
    if plain_eager(*args[:3]):
        return _attention_weights_bwd_impl(*args)
    return torch.ops.fused_attn.attention_weights_bwd(*args)


def norm_fwd(*args: Any) -> Any:
    """out, total (empty if it is input), mean (empty for rms), rstd; arguments as in the schema."""
    if plain_eager(*args[:3]):
        return _norm_fwd_impl(*args)
    return torch.ops.fused_attn.norm_fwd(*args)


def norm_bwd(*args: Any) -> Any:
    """Gradients of input (empty if it is residual's), residual, weight, bias."""
    if plain_eager(*args[:4]):
        return _norm_bwd_impl(*args)
    return torch.ops.fused_attn.norm_bwd(*args)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, float32 and 16-bit tensors in its type, as torch does for attention."""
    device_type = tensors[0].device.type
    if not _autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def autocast_norm(input: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Under autocast, the types that torch gives its norms: float32 on CUDA, any on the CPU."""
    device_type = input.device.type
    if device_type != "cuda" or not _autocasts(device_type) or input.dtype == torch.float64:
        return input, residual
    return input.float(), None if residual is None else residual.float()


def _autocasts(device_type: str) -> bool:
    available = torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


# ---- fakes --------------------------------------------------------------------------------------


def _attention_fwd_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    batch, num_heads, seqlen_q, _ = query.shape
    out = query.new_empty_strided(*out_layout(query, value))
    lse = query.new_empty(batch, num_heads, seqlen_q, dtype=statistics_dtype(query.dtype))
    for_backward = rest[-1]
    return out, lse, torch.empty_like(lse) if for_backward else lse.new_empty(0)


def _attention_bwd_fake(*args: Any) -> Any:
    _, _, query, key, value, _, _, _, bias, *rest = args
    needs_bias = rest[-2]
    return (
        query.new_empty_strided(*gradient_layout(query)),
        key.new_empty_strided(*gradient_layout(key)),
        value.new_empty_strided(*gradient_layout(value)),
        _grad_bias_fake(query, bias, needs_bias),
    )


def _grad_bias_fake(query: Tensor, bias: Tensor | None, needs_bias: bool) -> Tensor:
    if bias is None or not needs_bias:
        return query.new_empty(0)
    return torch.empty_like(bias, memory_format=torch.contiguous_format)


def _attention_weights_fake(query: Tensor, key: Tensor, *rest: Any) -> Any:
    return query.new_empty(_weights_shape(query, key, rest[-2]))


def _attention_weights_bwd_fake(*args: Any) -> Any:
    _, query, key, _, _, bias, *rest = args
    return (
        query.new_empty_strided(*gradient_layout(query)),
        key.new_empty_strided(*gradient_layout(key)),
        _grad_bias_fake(query, bias, rest[-2]),
    )


def _norm_fwd_fake(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dropout_p: float,
    *rest: Any,
) -> Any:
    statistics = statistics_dtype(input.dtype)
    has_total = residual is not None or dropout_p > 0.0
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        torch.empty_like(input, memory_format=torch.contiguous_format)
        if has_total
        else input.new_empty(0),
        input.new_empty(0 if rms else input.shape[0], dtype=statistics),
        input.new_empty(input.shape[0], dtype=statistics),
    )


def _norm_bwd_fake(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rms: bool,
    dropout_p: float,
    seed: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
    backend: str,
) -> Any:
    contiguous = torch.contiguous_format
    columns = total.shape[1]
    return (
        torch.empty_like(total, memory_format=contiguous)
        if dropout_p > 0.0
        else total.new_empty(0),
        torch.empty_like(total, memory_format=contiguous),
        mean.new_empty(columns if needs_weight else 0),
        mean.new_empty(columns if needs_bias else 0),
    )


# ---- registration -------------------------------------------------------------------------------

_library = torch.library.Library("fused_attn", "DEF")


def _register() -> None:
    for name, schema in SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, globals()[f"_{name}_op"], "CompositeExplicitAutograd")
        torch.library.register_fake(f"fused_attn::{name}", globals()[f"_{name}_fake"], lib=_library)


_register()


def _visible_flops(query_shape: Any, value_shape: Any, seqlen_k: int) -> tuple[int, int]:
    """Multiply-adds times two of one query @ key^T and one weights @ value."""
    *leading, head_dim = query_shape
    rows = math.prod(leading)
    return 2 * rows * seqlen_k * head_dim, 2 * rows * seqlen_k * value_shape[-1]


@register_flop_formula(torch.ops.fused_attn.attention_fwd)
def _attention_fwd_flops(
    query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """The count of the unmasked problem, as torch's formulas for attention have it; of packed
    sequences as if all keys' sequences were as long as the longest."""
    seqlen_k = args[NUM_SPEC_FIELDS - 1] or key_shape[-2]
    return sum(_visible_flops(query_shape, value_shape, seqlen_k))


@register_flop_formula(torch.ops.fused_attn.attention_weights)
def _attention_weights_flops(query_shape: Any, key_shape: Any, *args: Any, **kwargs: Any) -> int:
    return _visible_flops(query_shape, (0,), key_shape[-2])[0]


@register_flop_formula(torch.ops.fused_attn.attention_weights_bwd)
def _attention_weights_bwd_flops(
    grad_shape: Any, query_shape: Any, key_shape: Any, *args: Any, **kwargs: Any
) -> int:
    return 3 * _visible_flops(query_shape, (0,), key_shape[-2])[0]


@register_flop_formula(torch.ops.fused_attn.attention_bwd)
def _attention_bwd_flops(
    grad_shape: Any,
    grad_lse_shape: Any,
    query_shape: Any,
    key_shape: Any,
    value_shape: Any,
    *args: Any,
    **kwargs: Any,
) -> int:
    seqlen_k = args[3 + NUM_SPEC_FIELDS - 1] or key_shape[-2]  # after out, lse and lse_low
    scores, output = _visible_flops(query_shape, value_shape, seqlen_k)
    return 3 * scores + 2 * output
