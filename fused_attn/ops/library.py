"""Registered ops (torch.library): schemas, argument checks and fake implementations.

Plain eager calls go directly to the backend. Intercepted calls (torch.compile, export, FakeTensor,
selective checkpointing, DTensor) go through the ops, whose arguments are the fields of the
flattened call. The FLOP formulas of the ops are in flops.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import Backend, get_backend, reference
from fused_attn.base.flat import Flat
from fused_attn.base.namespace import NAMESPACE, OPS
from fused_attn.base.torch_state import has_tangent, needs_grad, plain_eager
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    WeightsBackward,
)
from fused_attn.call.norm import NormBackward, NormCall, NormGradients, NormOutputs
from fused_attn.call.packed import check_cu_seqlens
from fused_attn.call.validation import check_heads, check_length
from fused_attn.masks.fields import DIMENSIONS
from fused_attn.masks.tables import WORD
from fused_attn.ops import decompositions, flops, seeds


def accepted(results: Any) -> Any:
    """Return the results of a pass; raise ValueError if it returned None for an invalid call."""
    if results is None:
        raise ValueError(
            "the tensors of a validated call no longer fit together: a saved-tensor hook or another"
            " thread has changed them"
        )
    return results


# ---- entry points -------------------------------------------------------------------------------


def attention_fwd(
    call: AttentionCall, backend: Backend, for_backward: bool, want_lse: bool
) -> AttentionOutputs:
    """Compute the outputs of an attention forward.

    Args:
        for_backward: also compute the outputs that the backward needs. Otherwise, backends may use
            faster kernels for calls with few queries.
        want_lse: compute lse.
    """
    if plain_eager(*call.tensors()):
        return accepted(backend.attention_fwd(call, for_backward, want_lse))
    if torch.onnx.is_in_onnx_export():
        return decompositions.attention_fwd(call)
    return AttentionOutputs(*OPS.attention_fwd(*call.flat(), for_backward, want_lse, backend.name))


def attention_bwd(work: AttentionBackward, backend: Backend) -> AttentionGradients:
    """Compute the gradients of query, key, value and bias."""
    call, outputs, grad_out, grad_lse, needs_bias = work
    if plain_eager(grad_out, grad_lse, *call.tensors()):
        return accepted(backend.attention_bwd(work))
    rest = (*outputs.without_none(), grad_out, grad_lse, needs_bias, backend.name)
    return AttentionGradients(*OPS.attention_bwd(*call.flat(), *rest))


def attention_weights(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool, backend: Backend
) -> Tensor:
    """Compute the attention weights after dropout.

    Args:
        lse, lse_residual: outputs of `attention_fwd` with for_backward.
        average: average the weights over heads.
    """
    if plain_eager(*call.tensors(), lse):
        return backend.attention_weights(call, lse, lse_residual, average)
    if torch.onnx.is_in_onnx_export():
        return reference.attention_weights(call, average)
    rest = (lse, lse_residual, average, backend.name)
    return OPS.attention_weights(*call.flat(), *rest)


def attention_weights_bwd(work: WeightsBackward, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and bias for a gradient of `attention_weights`.

    The gradient of bias is an empty tensor without needs_bias.
    """
    call, *rest = work
    grad_weights = work.grad_weights
    if plain_eager(*call.tensors(), grad_weights):
        return backend.attention_weights_bwd(work)
    return OPS.attention_weights_bwd(*call.flat(), *rest, backend.name)


def norm_fwd(call: NormCall, backend: Backend, for_backward: bool, want_total: bool) -> NormOutputs:
    """Compute the outputs of a norm forward.

    Args:
        for_backward: also compute the statistics, mean and rstd.
        want_total: compute the sum residual + dropout(input).
    """
    if plain_eager(*call.tensors()):
        return accepted(backend.norm_fwd(call, for_backward, want_total))
    if torch.onnx.is_in_onnx_export():
        return decompositions.norm_fwd(call)
    return NormOutputs(*OPS.norm_fwd(*call.flat(), backend.name))


def norm_bwd(work: NormBackward, backend: Backend) -> NormGradients:
    """Compute the gradients of a norm."""
    call, grads = work.call, (work.grad_out, work.grad_total)
    if plain_eager(*grads, *call.tensors()):
        return _run_norm_kernels(work, backend)
    mean = work.rstd.new_empty(0) if work.mean is None else work.mean
    return NormGradients(*OPS.norm_bwd(*call.flat(), mean, *work[2:], backend.name))


def _run_norm_kernels(work: NormBackward, backend: Backend) -> NormGradients:
    """Run the norm backward, after resolving negative bits, which kernels ignore."""
    grad_out, grad_total = work.grad_out.resolve_neg(), work.grad_total
    grad_total = None if grad_total is None else grad_total.resolve_neg()
    return accepted(backend.norm_bwd(work._replace(grad_out=grad_out, grad_total=grad_total)))


# ---- implementations ----------------------------------------------------------------------------


def _run_attention_fwd(
    call: AttentionCall, for_backward: bool, want_lse: bool, backend: str
) -> Any:
    call = _checked_attention(call)
    outputs = accepted(get_backend(backend).attention_fwd(call, for_backward, want_lse))
    if not for_backward and not want_lse:
        # Some backends return lse anyway. Drop it, to match the fake implementation.
        outputs = outputs._replace(lse=None)
    return outputs.without_none()


def _run_attention_bwd(
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    lse_residual: Tensor,
    out_residual: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_bias: bool,
    backend: str,
) -> Any:
    call = _checked_attention(call)
    rows = call.query.shape[:3]
    shape = (*rows, call.value.shape[3])
    lows = [out_residual] if out.dtype.itemsize == 2 else []
    if any(t.shape != shape for t in (grad_out, out, *lows)):
        raise ValueError(
            f"out, grad_out and (for 16-bit types) out_residual must have shape {shape}, "
            f"got {_shapes(out, grad_out, *lows)}"
        )
    if any(t is not None and t.shape != rows for t in (grad_lse, lse, lse_residual)):
        got = _shapes(lse, lse_residual, grad_lse)
        raise ValueError(f"lse and its gradient must have shape {tuple(rows)}, got {got}")
    outputs = AttentionOutputs(out, lse, lse_residual, out_residual)
    work = AttentionBackward(call, outputs, grad_out, grad_lse, needs_bias)
    grads = accepted(get_backend(backend).attention_bwd(work))
    return grads.without_none()


def _run_attention_weights(
    call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool, backend: str
) -> Any:
    call = _checked_weights(call, lse, lse_residual)
    return get_backend(backend).attention_weights(call, lse, lse_residual, average)


def _run_attention_weights_bwd(call: AttentionCall, *rest: Any) -> Any:
    work = WeightsBackward(call, *rest[:-1])
    work = work._replace(call=_checked_weights(call, work.lse, work.lse_residual))
    if work.grad_weights.shape != call.weights_shape(work.average):
        shape, got = call.weights_shape(work.average), tuple(work.grad_weights.shape)
        raise ValueError(f"grad_weights must have shape {shape}, got {got}")
    return get_backend(rest[-1]).attention_weights_bwd(work)


def _run_norm_fwd(call: NormCall, backend: str) -> Any:
    input, residual = call.input, call.residual
    if input.dim() == 0 or (residual is not None and residual.shape != input.shape):
        got = _shapes(input, residual)
        raise ValueError(f"input and residual must have the same shape (*, columns), got {got}")
    if any(t is not None and t.shape != input.shape[-1:] for t in (call.weight, call.bias)):
        got = _shapes(call.weight, call.bias)
        raise ValueError(f"weight and bias must have shape ({input.shape[-1]},), got {got}")
    _check_dropout(call)
    outputs = accepted(get_backend(backend).norm_fwd(call, True, call.has_total))
    return outputs.without_none()


def _run_norm_bwd(call: NormCall, *rest: Any) -> Any:
    work = NormBackward(call, *rest[:-1])
    total, weight, mean, rstd = call.input, call.weight, work.mean, work.rstd
    grads = work.grad_out, work.grad_total
    if total.dim() == 0 or any(t is not None and t.shape != total.shape for t in grads):
        raise ValueError(
            "total, grad_out and grad_total must have the same shape (*, columns), "
            f"got {_shapes(total, *grads)}"
        )
    statistics = (rstd,) if call.options.rms else (mean, rstd)
    if any(t.shape != (call.rows,) for t in statistics) or (
        weight is not None and weight.shape != total.shape[-1:]
    ):
        raise ValueError(
            f"mean and rstd must have shape ({call.rows},), weight ({total.shape[-1]},), "
            f"got {_shapes(mean, rstd, weight)}"
        )
    _check_dropout(call)
    work = work._replace(mean=mean.contiguous(), rstd=rstd.contiguous())
    return _run_norm_kernels(work, get_backend(rest[-1])).without_none()


# Argument checks of the ops, for users who call torch.ops.fused_attn directly. The public functions
# validate their arguments before they call the ops.


def _checked_attention(call: AttentionCall) -> AttentionCall:
    """Validate a call of an op, and return its `kernel_layout`."""
    query, key, value, spec = call.query, call.key, call.value, call.mask
    if not query.dim() == key.dim() == value.dim() == 4:
        got = _shapes(query, key, value)
        raise ValueError(f"query, key and value must have 4 dimensions, got shapes {got}")
    num_heads, head_dim = query.shape[1], query.shape[3]
    if (
        key.shape[0] != query.shape[0]
        or key.shape[3] != head_dim
        or value.shape[:3] != key.shape[:3]
    ):
        got = _shapes(query, key, value)
        raise ValueError(
            "query and key must have the same batch size and head_dim, and value the batch size, "
            f"num_heads and seqlen of key, got shapes {got}"
        )
    check_heads("key", query, key)
    batch, seqlen_q, seqlen_k = call.sizes()
    check_length(seqlen_q, seqlen_k)
    if spec.cu_seqlens_q is not None:
        if query.shape[0] != 1 or spec.cu_seqlens_k is None or spec.bounds is None:
            raise ValueError("packed sequences must have batch size 1, cu_seqlens_k and bounds")
        check_cu_seqlens("cu_seqlens_q", spec.cu_seqlens_q, seqlen_q, query.shape[2])
        check_cu_seqlens("cu_seqlens_k", spec.cu_seqlens_k, seqlen_k, key.shape[2])
        if spec.cu_seqlens_k.shape[0] != batch + 1:
            got = _shapes(spec.cu_seqlens_k)
            raise ValueError(f"cu_seqlens_k must have shape ({batch + 1},), got {got}")
    sizes: dict[str, Any] = {"b": batch, "h": num_heads, "q": seqlen_q, "k": seqlen_k}
    sizes["w"] = -(-seqlen_k // WORD)
    for name, dims in DIMENSIONS.items():
        tensor = getattr(spec, name)
        if tensor is None:
            continue
        shape = [int(d) if d.isdigit() else sizes[d.lower()] for d in dims]
        if tensor.dim() != len(shape) or any(
            have != want and not (have == 1 and dim.islower())
            for have, want, dim in zip(tensor.shape, shape, dims, strict=True)
        ):
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    _check_dropout(call)
    return call.kernel_layout()


def _checked_weights(call: AttentionCall, lse: Tensor, lse_residual: Tensor) -> AttentionCall:
    if call.mask.cu_seqlens_q is not None or call.mask.cu_seqlens_k is not None:
        raise ValueError(
            "attention weights are not available for packed sequences: pad the sequences"
        )
    call = _checked_attention(call)
    if any(t.shape != call.query.shape[:3] for t in (lse, lse_residual)):
        expected, got = tuple(call.query.shape[:3]), (tuple(lse.shape), tuple(lse_residual.shape))
        raise ValueError(f"lse and lse_residual must have shape {expected}, got {got}")
    return call


def _shapes(*tensors: Tensor | None) -> str:
    """Return the shapes of tensors as text, for error messages."""
    return ", ".join("None" if t is None else str(tuple(t.shape)) for t in tensors)


def _check_dropout(call: AttentionCall | NormCall) -> None:
    if call.options.dropout_p > 0.0 and call.options.seed is None:
        raise ValueError("seed must be given with dropout_p > 0, got None")
    offsets = call.options.dropout_offsets
    if offsets is None:
        return
    if isinstance(call, AttentionCall):
        device, expected = call.query.device, f"shape ({call.sizes()[0]}, 3)"
        fits = offsets.shape == (call.sizes()[0], 3)
    else:
        device, rows = call.input.device, call.rows
        expected = f"one dimension, whose size divides {rows}"
        fits = offsets.dim() == 1 and rows % max(offsets.shape[0], 1) == 0
        fits = fits and (offsets.shape[0] > 0 or rows == 0)
    if offsets.dtype != torch.int64 or offsets.device != device or not fits:
        got = f"{offsets.dtype} of shape {tuple(offsets.shape)} on {offsets.device}"
        raise ValueError(f"dropout_offsets must be int64 on {device} with {expected}, got {got}")


# ---- registration -------------------------------------------------------------------------------

_library = torch.library.Library(NAMESPACE, "DEF")


def _register(run: Any, fake: Any, call: type[Flat], parameters: str, returns: str) -> None:
    """Register an op, with its fake implementation and its vmap rule.

    The arguments of the op are the fields of the flattened call, `parameters`, and the name of the
    backend.

    Args:
        run: function _run_<name of the op>, which receives the call as one object.
        fake: function with the same arguments that allocates the results.
        parameters: further parameters, in schema syntax, each followed by ", ".
    """
    name, size = run.__name__.removeprefix("_run_"), len(call.NAMES)

    def unflatten(function: Any) -> Any:
        def of_flat(*values: Any) -> Any:
            results = function(call.of_flat(values), *values[size:])
            return results if isinstance(results, Tensor) else tuple(results)

        return of_flat

    _library.define(f"{name}({call.SCHEMA}, {parameters}str backend) -> {returns}")
    _library.impl(name, unflatten(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", unflatten(fake), lib=_library)
    op = getattr(OPS, name)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", _vmap_rule(op), lib=_library)


def register_autograd(name: str, call: type[Flat], apply: Any) -> None:
    """Register the function that computes an op if any of its tensors needs a gradient.

    Args:
        apply: receives the call as one object, like `_run_<name>`.
    """
    op, size = getattr(OPS, name).default, len(call.NAMES)

    def differentiable(keys: Any, *values: Any) -> Any:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if has_tangent(*tensors):
            raise NotImplementedError(
                "compiled and exported programs have no forward-mode derivatives of fused_attn's"
                " ops: call the model uncompiled"
            )
        if needs_grad(*tensors):
            results = apply(call.of_flat(values), *values[size:])
            return results if isinstance(results, Tensor) else tuple(results)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *values)

    _library.impl(name, differentiable, "Autograd", with_keyset=True)


def _vmap_rule(op: Any) -> Any:
    """Return a torch.vmap rule that runs an op once for each element of the batch.

    Only backward ops use the rule, for batched gradients of unbatched tensors. Forwards under vmap
    use the reference.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        rows = []
        for i in range(info.batch_size):
            row = zip(values, in_dims, strict=True)
            results = op(*(v if dim is None else v.select(dim, i) for v, dim in row))
            rows.append((results,) if isinstance(results, Tensor) else results)
        stacked = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return (stacked, (0,) * len(stacked)) if len(stacked) > 1 else (stacked[0], 0)

    return rule


def _fake_attention_weights_bwd(call: AttentionCall, *rest: Any) -> Any:
    query, key, _, bias = call.gradients(needs_bias=rest[-2])
    return query, key, bias


_register(
    _run_attention_fwd,
    lambda call, for_backward, want_lse, backend: call.outputs(for_backward, want_lse),
    AttentionCall,
    "bool for_backward, bool want_lse, ",
    "(Tensor out, Tensor lse, Tensor lse_residual, Tensor out_residual)",
)
_register(
    _run_attention_bwd,
    lambda call, *rest: call.gradients(needs_bias=rest[-2]),
    AttentionCall,
    "Tensor out, Tensor lse, Tensor lse_residual, Tensor out_residual, Tensor grad_out, "
    "Tensor? grad_lse, bool needs_bias, ",
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)",
)
_register(
    _run_attention_weights,
    lambda call, *rest: call.weights(average=rest[-2]),
    AttentionCall,
    "Tensor lse, Tensor lse_residual, bool average, ",
    "Tensor",
)
_register(
    _run_attention_weights_bwd,
    _fake_attention_weights_bwd,
    AttentionCall,
    "Tensor lse, Tensor lse_residual, Tensor grad_weights, bool average, bool needs_bias, ",
    "(Tensor grad_query, Tensor grad_key, Tensor grad_bias)",
)
_register(
    _run_norm_fwd,
    lambda call, backend: call.outputs(),
    NormCall,
    "",
    "(Tensor out, Tensor total, Tensor mean, Tensor rstd)",
)
_register(
    _run_norm_bwd,
    lambda call, *rest: call.gradients(needs_weight=rest[-3], needs_bias=rest[-2]),
    NormCall,
    "Tensor mean, Tensor rstd, Tensor grad_out, Tensor? grad_total, bool needs_weight, "
    "bool needs_bias, ",
    "(Tensor grad_input, Tensor grad_total_sum, Tensor grad_weight, Tensor grad_bias)",
)

flops.register()
seeds.register(_library)
