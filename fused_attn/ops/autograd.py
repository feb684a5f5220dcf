"""autograd.Functions around the ops.

First order runs on the kernels; the backward of a backward is in second_order.py. A call goes into
`apply` whole, and its tensors beside it, where autograd and torch.compile see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, reference
from fused_attn.base import philox
from fused_attn.base.flat import Flat, FlatT
from fused_attn.base.layout import readable_in_place
from fused_attn.base.torch_state import batched, batched_by_autograd, plain_eager
from fused_attn.call.calls import AttentionCall, AttentionOutputs, NormCall
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, spec_at_once, with_summaries
from fused_attn.ops import library as ops
from fused_attn.ops.second_order import differentiated, give_second_order


def attention(call: AttentionCall, backend: Backend, with_lse: bool) -> tuple[Tensor, Tensor]:
    """out, and lse, which may be empty unless `with_lse`."""
    call = _seeded(call, backend)
    if backend.differentiable:
        out, lse = backend.attention_fwd(call, with_lse)[:2]
        plain = not torch.compiler.is_compiling() and call.mask.cu_seqlens_q is None
        if plain and out.requires_grad and call.dropout_p == 0.0:
            give_second_order(out, call.tensors(), lambda: call)
        return out, lse
    call = _readable(call, backend)
    if _needs_grad(call):
        call = _apart(call) if torch.compiler.is_compiling() else call
        return _Attention.apply(call, backend, *call.tensors())[:2]
    return ops.attention_fwd(call, backend, False)[:2]


def attention_at_once(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """out with its gradients, of a call that nothing watches; None: it has to go the whole way."""
    spec = None
    if attn_mask is not None or is_causal:
        spec = spec_at_once(attn_mask, is_causal, query, key)
        if spec is None:
            return None
        spec = with_summaries(spec, backend.tile_summary)
    rest = _AtOnceCall(query.device, float(dropout_p), spec, scale)
    outputs = backend.outputs_at_once(query, key, value, *rest.fields(), enable_gqa)
    if outputs is None:
        return None
    masks = () if spec is None else spec.tensors()
    if any(tensor is not None for tensor in masks):
        assert spec is not None
        rest.spec = spec.without_tensors()
    else:
        masks = ()
    return _AttentionAtOnce.apply(rest, backend, outputs, query, key, value, *masks)


@dataclass
class _Dropout:
    """That of a call whose seed is drawn where it is first asked for."""

    device: torch.device
    dropout_p: float
    seed: Tensor | None = field(default=None, kw_only=True)

    def draw(self) -> int:
        """The seed, without its sign."""
        if self.seed is None:
            self.seed = philox.new_seed(self.device)
        return int(self.seed) & ((1 << 64) - 1)


@dataclass
class _AtOnceCall(_Dropout):
    """What a backward needs of such a call but for its tensors."""

    spec: MaskSpec | None
    scale: float | None

    def fields(self) -> tuple[MaskSpec | None, float | None, float, Callable[[], int]]:
        """As backends take them."""
        return self.spec, self.scale, self.dropout_p, self.draw


def attention_with_weights(
    call: AttentionCall, average: bool, backend: Backend
) -> tuple[Tensor, Tensor]:
    """out, and the weights that made it."""
    call = _seeded(call, backend)
    if backend.differentiable:
        return backend.attention_with_weights(call, average)
    call = _readable(call, backend)
    needs_grad = _needs_grad(call)
    if needs_grad:
        call = _apart(call) if torch.compiler.is_compiling() else call
        out, lse, lse_low, _ = _Attention.apply(call, backend, *call.tensors())
    else:
        out, lse, lse_low, _ = ops.attention_fwd(call, backend, True)
    # The weights are a function of query, key and bias: that lse is known is no business of theirs.
    lse = lse.detach()
    if needs_grad:
        return out, _Weights.apply(call, lse, lse_low, average, backend, *call.tensors())
    return out, ops.attention_weights(call, lse, lse_low, average, backend)


def norm(call: NormCall, backend: Backend) -> tuple[Tensor, Tensor]:
    """out and residual + dropout(input)."""
    call = _seeded(call, backend)
    if backend.differentiable:
        out, total = backend.norm_fwd(call)[:2]
    elif _needs_grad(call):
        call = _apart(call) if torch.compiler.is_compiling() else call
        out, total = _Norm.apply(call, backend, *call.tensors())[:2]
    else:
        out, total = ops.norm_fwd(call, backend)[:2]
    return out, total if call.has_total else call.input


def norm_at_once(
    backend: Backend,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dropout_p: float,
    with_total: bool,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """The norm over the last dimension with its gradients, of a call that nothing watches, and with
    the sum if that is wanted; None: it has to go the whole way."""
    rest = _NormAtOnceCall(input.device, float(dropout_p), eps, rms)
    tensors = (input, residual, weight, bias)
    outputs = backend.norm_outputs_at_once(*tensors, *rest.fields())
    if outputs is None:
        return None
    out, total = _NormAtOnce.apply(rest, backend, outputs, *tensors)
    return out if not with_total else (out, input if total is None else total)


@dataclass
class _NormAtOnceCall(_Dropout):
    """What a backward needs of such a norm but for its tensors."""

    eps: float
    rms: bool

    def fields(self) -> tuple[float, bool, float, Callable[[], int]]:
        """As backends take them."""
        return self.eps, self.rms, self.dropout_p, self.draw


def _seeded(call: Any, backend: Backend) -> Any:
    """The call, with a new seed where the backend drops by one."""
    if call.dropout_p == 0.0 or call.seed is not None or backend.torchs_own:
        return call
    return replace(call, seed=philox.new_seed(call.tensors()[0].device))


def _readable(call: AttentionCall, backend: Backend) -> AttentionCall:
    """The call as kernels read it."""
    call = call.readable()
    mask = with_summaries(call.mask, backend.tile_summary)
    return call if mask is call.mask else replace(call, mask=mask)


def _apart(call: FlatT) -> FlatT:
    """The call with no tensor twice, which torch.compile does not take of a Function."""
    tensors: list[Tensor | None] = []
    for tensor in call.tensors():
        if tensor is not None and any(tensor is other for other in tensors):
            tensor = tensor.view_as(tensor)
        tensors.append(tensor)
    return call.with_tensors(tensors)


def _needs_grad(call: Flat) -> bool:
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in call.tensors()
    )


def _wanted(ctx: Any, name: str) -> bool:
    """True where the backward has to give a gradient of a tensor of the call, which came last."""
    tensors = ctx.call.TENSORS
    return ctx.needs_input_grad[tensors.index(name) - len(tensors)]


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]


def _saved(ctx: Any) -> list[Any]:
    """The tensors of `_save` in their types: hooks may give back others than they took."""
    saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t, dtype in saved]


# forward takes ctx: with a setup_context of its own, apply would inspect signatures at every call,
# which takes longer than a small kernel. (No functorch transform comes here, see torch_state.)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, backend: Backend, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = ops.attention_fwd(call, backend, True)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs.lse_low, outputs.out_low)
        _save(ctx, *outputs, *tensors)
        ctx.call, ctx.backend = call.without_tensors(), backend
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        if grad_out is None and grad_lse is None:
            return (None, None, *ctx.call.by_tensor())
        out, lse, lse_low, out_low, *tensors = _saved(ctx)
        call = ctx.call.with_tensors(tensors).readable()
        outputs = AttentionOutputs(out, lse, lse_low, out_low).readable()
        given = torch.zeros_like(out) if grad_out is None else grad_out
        needs_bias = _wanted(ctx, "bias")
        grads = _gradients(call, outputs, given, grad_lse, needs_bias, ctx.backend)
        by_name = dict(zip(call.DIFFERENTIABLE, grads, strict=True))
        if not needs_bias:
            del by_name["bias"]
        return (None, None, *call.by_tensor(**by_name))


def _gradients(
    call: AttentionCall,
    outputs: AttentionOutputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_bias: bool,
    backend: Backend,
) -> Any:
    """Those of query, key, value and bias, which can be differentiated."""

    def run() -> Any:
        return ops.attention_bwd(call, outputs, grad_out, grad_lse, needs_bias, backend)

    given = grad_out, grad_lse
    return differentiated(run, call, call.DIFFERENTIABLE, given, reference.attention)


class _AttentionAtOnce(Function):
    """Of results that are there already."""

    @staticmethod
    def forward(
        ctx: Any,
        rest: _AtOnceCall,
        backend: Backend,
        outputs: AttentionOutputs,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        _save(ctx, *outputs, *tensors)
        ctx.rest, ctx.backend = rest, backend
        return outputs.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        nothing = (None,) * 3
        if grad_out is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, lse_low, out_low, query, key, value, *masks = _saved(ctx)
        rest, backend = ctx.rest, ctx.backend
        if masks:
            rest = replace(rest, spec=rest.spec.with_tensors(masks))
        no_masks = (None,) * len(masks)
        outputs, qkv = AttentionOutputs(out, lse, lse_low, out_low), (query, key, value)
        plain = plain_eager(grad_out) and not batched_by_autograd(grad_out)
        if plain and not torch.is_grad_enabled():
            given = readable_in_place(grad_out)
            grads = backend.gradients_at_once(given, outputs, *qkv, *rest.fields())
            if grads is not None:
                return (*nothing, *grads, *no_masks)
        spec = MaskSpec() if rest.spec is None else rest.spec
        scale = query.shape[-1] ** -0.5 if rest.scale is None else float(rest.scale)
        dropout = rest.dropout_p, rest.seed
        call = AttentionCall(*qkv, spec, scale, 0.0, *dropout).readable()
        if out_low is None:
            outputs = outputs._replace(out_low=lse.new_empty(0, dtype=torch.int16))
        grads = _gradients(call, outputs.readable(), grad_out, None, False, backend)
        return (*nothing, *grads[:3], *no_masks)


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        lse: Tensor,
        lse_low: Tensor,
        average: bool,
        backend: Backend,
        *tensors: Tensor | None,
    ) -> Tensor:
        _save(ctx, lse, lse_low, *tensors)
        ctx.call, ctx.average, ctx.backend = call.without_tensors(), average, backend
        return ops.attention_weights(call, lse, lse_low, average, backend)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        lse, lse_low, *tensors = _saved(ctx)
        call, average = ctx.call.with_tensors(tensors).readable(), ctx.average
        needs_bias = _wanted(ctx, "bias")

        def run() -> Any:
            return ops.attention_weights_bwd(
                call, lse, lse_low, grad_weights, average, needs_bias, ctx.backend
            )

        def weights(call: AttentionCall) -> tuple[Tensor]:
            return (reference.attention_weights(call, average),)

        grads = differentiated(run, call, ("query", "key", "bias"), (grad_weights,), weights)
        by_name = {"query": grads[0], "key": grads[1]}
        if needs_bias:
            by_name["bias"] = grads[2]
        return (None, None, None, None, None, *call.by_tensor(**by_name))


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, call: NormCall, backend: Backend, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = ops.norm_fwd(call, backend)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs.mean, outputs.rstd)
        # The kernel needs the sum alone, which is input where nothing was added; second order
        # differentiates the reference, which starts from input and residual.
        total = outputs.total if call.has_total else call.input
        _save(ctx, total, outputs.mean, outputs.rstd, *tensors)
        ctx.call, ctx.backend = call.without_tensors(), backend
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None, *_: Any) -> Any:
        total, mean, rstd, *tensors = _saved(ctx)
        mean, rstd = mean.contiguous(), rstd.contiguous()
        call = ctx.call.with_tensors(tensors)
        if not call.has_total:
            grad_total = None  # of the empty output; torch.compile hands zeros in
        if grad_out is None and grad_total is None:
            return (None, None, *call.by_tensor())
        needs = _wanted(ctx, "weight"), _wanted(ctx, "bias")
        grads = grad_out, grad_total
        return (None, None, *_norm_gradients(call, total, mean, rstd, *grads, needs, ctx.backend))


def _norm_gradients(
    call: NormCall,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_out: Tensor | None,
    grad_total: Tensor | None,
    needs: tuple[bool, bool],
    backend: Backend,
) -> tuple[Tensor | None, ...]:
    """By tensor of the call, differentiable; needs: whether weight and bias want theirs."""
    given = torch.zeros_like(total) if grad_out is None else grad_out
    of_total = call.of_total(total)

    def run() -> Any:
        return ops.norm_bwd(of_total, mean, rstd, given, grad_total, *needs, backend)

    # Without dropout the gradient of input is that of the sum, and so is residual's.
    dropped = call.dropout_p > 0.0
    of_sum = "residual" if call.residual is not None else None if dropped else "input"
    names = ("input" if dropped else None, of_sum, "weight", "bias")
    grads = differentiated(run, call, names, (given, grad_total), reference.norm)
    by_name = {"input": grads[0] if dropped else grads[1]}
    if call.residual is not None:
        by_name["residual"] = grads[1]
    if call.weight is not None and needs[0]:
        by_name["weight"] = grads[2].to(call.weight.dtype)
    if call.bias is not None and needs[1]:
        by_name["bias"] = grads[3].to(call.bias.dtype)
    return call.by_tensor(**by_name)


class _NormAtOnce(Function):
    """Of results that are there already."""

    @staticmethod
    def forward(
        ctx: Any,
        rest: _NormAtOnceCall,
        backend: Backend,
        outputs: tuple[Tensor | None, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        out, total, mean, rstd = outputs
        ctx.set_materialize_grads(False)
        _save(ctx, tensors[0] if total is None else total, mean, rstd, *tensors)
        ctx.rest, ctx.backend = rest, backend
        return out, total

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_total: Tensor | None) -> Any:
        nothing = (None,) * 3
        if grad_out is None and grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        total, mean, rstd, *tensors = _saved(ctx)
        rest, backend, needs = ctx.rest, ctx.backend, ctx.needs_input_grad[-2:]
        plain = plain_eager(grad_out, grad_total) and not batched(grad_out, grad_total)
        if plain and grad_out is not None and not torch.is_grad_enabled():
            given = grad_out, grad_total, total, mean, rstd, tensors[2]
            grads = backend.norm_gradients_at_once(*given, *rest.fields(), *needs)
            if grads is not None:
                of_input, of_sum, *of_parameters = grads
                of_input = of_sum if of_input is None else of_input
                of_residual = None if tensors[1] is None else of_sum
                return (*nothing, of_input, of_residual, *of_parameters)
        input, residual, weight, bias = tensors
        options = rest.eps, rest.rms, rest.dropout_p, rest.seed
        call = NormCall(input, residual, weight, bias, *options)
        mean = rstd.new_empty(0) if mean is None else mean.contiguous()
        statistics = mean, rstd.contiguous()
        grads = _norm_gradients(call, total, *statistics, grad_out, grad_total, needs, backend)
        by_name = dict(zip(NormCall.TENSORS, grads, strict=True))
        return (*nothing, *(by_name[name] for name in NormCall.DIFFERENTIABLE))
