"""Call objects, which hold all arguments of an operation and allocate its outputs.

A call passes from the public function to the kernel as one object. Its methods compute the shapes
and strides of outputs and gradients for all backends and for the fake implementations of the ops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fused_attn.base.flat import Flat, empty_strided, flattens
from fused_attn.base.layout import (
    EMPTY_LAYOUT,
    contiguous,
    kernel_strides,
    laid_out_like,
    rows_in_place,
)
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.options import AttentionOptions, NormOptions, with_dense_offsets
from fused_attn.masks.spec import MaskSpec


class Empty(Protocol):
    """Function that allocates an uninitialized tensor with the given strides."""

    def __call__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor: ...


class AttentionOutputs(NamedTuple):
    """Results of an attention forward.

    A missing result is None, or an empty tensor where all results must be tensors: in the ops of
    torch.library, and where kernels write to the results of `AttentionCall.outputs`.

    Attributes:
        out: (batch, num_heads, seqlen_q, head_dim_v), in query's layout (see `laid_out_like`).
        lse: (batch, num_heads, seqlen_q), float32 (float64 for float64 inputs). Missing if it is
            not requested and no backward follows.
        lse_residual: rounding error of lse, same shape and dtype. Missing if no backward follows.
        out_residual: rounding error of a 16-bit out, encoded as int16 (csrc/fields/attention.inc),
            in the shape and layout of out. Missing if no backward follows, or if out has a wider
            dtype. The backward computes its row sums from out and out_residual. In query rows with
            few visible keys, or with nearly all weight on one key, the rounding error of out alone
            would exceed the gradients of the scores.
    """

    out: Tensor
    lse: Any  # this and the following fields: Tensor | None
    lse_residual: Any
    out_residual: Any

    def kernel_layout(self) -> AttentionOutputs:
        """Return these results with the strides that backward kernels support."""
        low = self.out_residual
        return AttentionOutputs(
            kernel_strides(self.out),
            self.lse.contiguous(),
            self.lse_residual.contiguous(),
            low if low is None else kernel_strides(low),
        )

    def without_none(self) -> AttentionOutputs:
        """Return these results with empty tensors in place of None."""
        out, lse, lse_residual, out_residual = self
        statistics = statistics_dtype(out.dtype)
        return AttentionOutputs(
            out,
            _or_empty(lse, out, statistics),
            _or_empty(lse_residual, out, statistics),
            _or_empty(out_residual, out, torch.int16),
        )


class AttentionGradients(NamedTuple):
    """Gradients of an attention call, each in the shape and dtype of its tensor.

    In a partial result, all have the statistics dtype.
    The gradient of bias is None, or an empty tensor in torch.library ops, if it is not requested.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Any  # Tensor | None

    def without_none(self) -> AttentionGradients:
        """Return these gradients with an empty tensor in place of None."""
        query, key, value, bias = self
        return AttentionGradients(query, key, value, _or_empty(bias, query, query.dtype))


@flattens
@dataclass(eq=False)
class AttentionCall(Flat):
    """Validated attention call: softmax(mask(scale * query @ key^T)) @ value.

    Attributes:
        query: (batch, num_heads, seqlen_q, head_dim). For packed sequences (see MaskSpec), batch is
            1 in query, key and value.
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        mask: the visible positions, and the bias added to the scores.
        options: scale, softcap and dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskSpec
    options: AttentionOptions

    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("query", "key", "value", "bias")
    enable_gqa: ClassVar[bool] = True  # validation ensures that num_heads_kv divides num_heads

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of out and of the gradients of query, key and value."""
        own = self.query.dtype
        return statistics_dtype(own) if self.options.partial else own

    def sizes(self) -> tuple[int, int, int]:
        """Return (batch, seqlen_q, seqlen_k); for packed sequences see `MaskSpec.sizes`."""
        return self.mask.sizes(self.query, self.key)

    def kernel_layout(self) -> AttentionCall:
        """Return this call with all tensors in layouts that kernels support."""
        q, k, v = (kernel_strides(t) for t in (self.query, self.key, self.value))
        return AttentionCall(q, k, v, self.mask.kernel_layout(), with_dense_offsets(self.options))

    def outputs(self, for_backward: bool, want_lse: bool = True) -> AttentionOutputs:
        """Allocate uninitialized results; missing results are empty tensors.

        Args:
            for_backward: also allocate lse and the residuals, for a backward.
            want_lse: also allocate lse.
        """
        query = self.query
        batch, num_heads, seqlen_q, _ = query.shape
        out = laid_out_like(query, (batch, num_heads, seqlen_q, self.value.shape[3]))
        dtype, device = statistics_dtype(query.dtype), query.device
        rows = (batch, num_heads, seqlen_q), (num_heads * seqlen_q, seqlen_q, 1)
        rounds = for_backward and self.out_dtype.itemsize == 2
        return AttentionOutputs(
            empty_strided(*out, self.out_dtype, device),
            empty_strided(*(rows if for_backward or want_lse else EMPTY_LAYOUT), dtype, device),
            empty_strided(*(rows if for_backward else EMPTY_LAYOUT), dtype, device),
            empty_strided(*(out if rounds else EMPTY_LAYOUT), torch.int16, device),
        )

    def gradients(self, needs_bias: bool, empty: Empty = empty_strided) -> AttentionGradients:
        """Allocate uninitialized gradients of query, key, value and bias.

        Query, key and value gradients have the dimension order of their tensors. The bias gradient
        is contiguous, or empty without needs_bias.
        """
        query, bias = self.query, self.mask.bias
        wanted = bias if needs_bias else None
        q, k, v = (
            empty(*laid_out_like(t, t.shape), self.out_dtype, t.device)
            for t in (query, self.key, self.value)
        )
        return AttentionGradients(
            q,
            k,
            v,
            empty(*EMPTY_LAYOUT, query.dtype, query.device)
            if wanted is None
            else empty(
                *contiguous(wanted.shape),
                self.out_dtype if self.options.partial else wanted.dtype,
                wanted.device,
            ),
        )

    def weights(self, average: bool, empty: Empty = empty_strided) -> Tensor:
        """Allocate uninitialized attention weights in the dtype of query.

        Their shape is (batch, num_heads, seqlen_q, seqlen_k), or (batch, seqlen_q, seqlen_k) if
        they are averaged over heads.
        """
        query = self.query
        return empty(*contiguous(self.weights_shape(average)), query.dtype, query.device)

    def weights_shape(self, average: bool) -> tuple[int, ...]:
        """Return the shape of `weights`."""
        batch, num_heads, seqlen_q, _ = self.query.shape
        heads = () if average else (num_heads,)
        return (batch, *heads, seqlen_q, self.key.shape[2])


class AttentionBackward(NamedTuple):
    """A backward of attention.

    Attributes:
        call, outputs: those of the forward.
        grad_out: gradient of out.
        grad_lse: gradient of lse, or None.
        needs_bias: compute the gradient of bias, too.
    """

    call: AttentionCall
    outputs: AttentionOutputs
    grad_out: Tensor
    grad_lse: Tensor | None
    needs_bias: bool


class WeightsBackward(NamedTuple):
    """A backward of the attention weights.

    Attributes:
        call: the call of the forward.
        lse, lse_residual: outputs of the forward.
        grad_weights: gradient of the weights.
        average: the weights are averaged over heads.
        needs_bias: compute the gradient of bias, too.
    """

    call: AttentionCall
    lse: Tensor
    lse_residual: Tensor
    grad_weights: Tensor
    average: bool
    needs_bias: bool


class NormOutputs(NamedTuple):
    """Results of a norm forward; missing results are None or empty, as in AttentionOutputs.

    Attributes:
        out: (*, columns), contiguous, in the dtype of input.
        total: residual + dropout(input); shape, layout and dtype as out. Missing if it equals input
            or is not requested.
        mean: (rows,), float32 (float64 for float64 inputs). Missing for RMS norms.
        rstd: (rows,), reciprocal of the standard deviation (RMS norms: of the root mean square),
            same dtype as mean.
    """

    out: Tensor
    total: Any  # this and the following fields: Tensor | None
    mean: Any
    rstd: Any

    def without_none(self) -> NormOutputs:
        """Return these results with empty tensors in place of None."""
        out, total, mean, rstd = self
        statistics = statistics_dtype(out.dtype)
        return NormOutputs(
            out,
            _or_empty(total, out, out.dtype),
            _or_empty(mean, out, statistics),
            _or_empty(rstd, out, statistics),
        )


class NormGradients(NamedTuple):
    """Gradients of a norm call; missing gradients are None or empty, as in AttentionOutputs.

    Attributes:
        input: (*, columns), contiguous. Missing without dropout, as it then equals `total`.
        total: (*, columns), contiguous; the gradient of residual + dropout(input), which is also
            the gradient of residual.
        weight, bias: (columns,), in the dtype of rstd. Missing if not requested.
    """

    input: Any  # Tensor | None, as are weight and bias
    total: Tensor
    weight: Any
    bias: Any

    def without_none(self) -> NormGradients:
        """Return these gradients with empty tensors in place of None."""
        input, total, weight, bias = self
        statistics = statistics_dtype(total.dtype)
        return NormGradients(
            _or_empty(input, total, total.dtype),
            total,
            _or_empty(weight, total, statistics),
            _or_empty(bias, total, statistics),
        )


@flattens
@dataclass(eq=False)
class NormCall(Flat):
    """Validated layer norm or RMS norm call: norm(residual + dropout(input)) of each row.

    Attributes:
        input: (*, columns). Each vector along the last dimension is a row.
        residual: same shape and dtype as input, or None.
        weight, bias: (columns,), or None.
        options: eps, type of norm, and dropout.
    """

    input: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    options: NormOptions

    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("input", "residual", "weight", "bias")

    @property
    def normalized_shape(self) -> tuple[int]:
        """Shape of the normalized dimension: (columns,)."""
        return (self.input.shape[-1],)

    @property
    def rows(self) -> int:
        """Number of rows: the product of the leading dimensions of input."""
        return math.prod(self.input.shape[:-1])

    @property
    def has_total(self) -> bool:
        """True if the call has a residual or dropout, so the sum differs from input."""
        return self.residual is not None or self.options.dropout_p > 0.0

    def kernel_layout(self) -> NormCall:
        """Return this call with all tensors in layouts that kernels support.

        Input and residual are views or copies (see `rows_in_place`). Weight and bias are converted
        to contiguous tensors in the dtype of the statistics.
        """
        own, dtype = self.input.dtype, statistics_dtype(self.input.dtype)
        input, residual = rows_in_place(self.input), self.residual
        if residual is not None:
            residual = rows_in_place(residual.to(own))
        weight, bias = _dense(self.weight, dtype), _dense(self.bias, dtype)
        return NormCall(input, residual, weight, bias, with_dense_offsets(self.options))

    def contiguous_call(self) -> NormCall:
        """Return this call with contiguous tensors in the dtypes that kernels support.

        In contrast to `kernel_layout`, the shape of input is not changed.
        """
        own, dtype = self.input.dtype, statistics_dtype(self.input.dtype)
        return NormCall(
            self.input.contiguous().resolve_neg(),
            _dense(self.residual, own),
            _dense(self.weight, dtype),
            _dense(self.bias, dtype),
            with_dense_offsets(self.options),
        )

    def of_total(self, total: Tensor) -> NormCall:
        """Return the call for the backward, with `total` as input and without a residual.

        Args:
            total: residual + dropout(input) of the forward.
        """
        return NormCall(total, None, self.weight, self.bias, self.options)

    def outputs(self, empty: Empty = empty_strided) -> NormOutputs:
        """Allocate uninitialized results; missing results are empty tensors."""
        like = self.input
        rows, dtype = self.rows, statistics_dtype(like.dtype)
        matrix = contiguous(like.shape)
        return NormOutputs(
            empty(*matrix, like.dtype, like.device),
            empty(*(matrix if self.has_total else EMPTY_LAYOUT), like.dtype, like.device),
            empty((0 if self.options.rms else rows,), (1,), dtype, like.device),
            empty((rows,), (1,), dtype, like.device),
        )

    def gradients(
        self, needs_weight: bool, needs_bias: bool, empty: Empty = empty_strided
    ) -> NormGradients:
        """Allocate uninitialized gradients; missing gradients are empty tensors."""
        like = self.input
        columns, dtype = like.shape[-1], statistics_dtype(like.dtype)
        matrix = contiguous(like.shape)
        return NormGradients(
            empty(
                *(matrix if self.options.dropout_p > 0.0 else EMPTY_LAYOUT), like.dtype, like.device
            ),
            empty(*matrix, like.dtype, like.device),
            empty((columns if needs_weight else 0,), (1,), dtype, like.device),
            empty((columns if needs_bias else 0,), (1,), dtype, like.device),
        )


class NormBackward(NamedTuple):
    """A backward of a norm.

    Attributes:
        call: the result of `NormCall.of_total`, so call.input is the sum that was normalized.
        mean, rstd: outputs of the forward. mean is None, or empty, for RMS norms.
        grad_out: gradient of out.
        grad_total: gradient of the sum, or None.
        needs_weight, needs_bias: compute these gradients, too.
    """

    call: NormCall
    mean: Any
    rstd: Tensor
    grad_out: Tensor
    grad_total: Tensor | None
    needs_weight: bool
    needs_bias: bool


CallT = TypeVar("CallT", AttentionCall, NormCall)


def with_options(call: CallT, **options: Any) -> CallT:
    """Return a copy of the call with some options replaced."""
    return replace(call, options=replace(call.options, **options))


def _or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor, or an empty tensor on the device of `like` if it is None."""
    return like.new_empty(0, dtype=dtype) if tensor is None else tensor


def _dense(tensor: Any, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype).contiguous().resolve_neg()
