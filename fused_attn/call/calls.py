"""Calls as values: all arguments of an operation, and the layouts of its outputs.

A call passes from the public function to the kernel as one object. It alone computes the shapes of
outputs and gradients, for every backend and for torch.compile's fake implementations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fused_attn.base.flat import Flat, empty_strided, flattens
from fused_attn.base.layout import (
    NOTHING,
    contiguous,
    kernel_strides,
    laid_out_like,
    rows_in_place,
)
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.options import AttentionOptions, NormOptions, with_dense_offsets
from fused_attn.masks.spec import MaskSpec


class Empty(Protocol):
    """A function that allocates an uninitialised tensor."""

    def __call__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor: ...


class AttentionOutputs(NamedTuple):
    """Results of a forward.

    A missing result is None, or an empty tensor in ops of torch.library, which must return one.

    Attributes:
        out: (batch, num_heads, seqlen_q, head_dim_v), in query's layout (see `laid_out_like`).
        lse: (batch, num_heads, seqlen_q), float32 (float64 for float64); missing if it is not
            requested and no backward follows.
        lse_residual: rounding error of lse, same shape and dtype; missing if no backward follows.
        out_residual: rounding error of a 16-bit out, as int16 in the shape and layout of out (see
            csrc/fields/attention.inc); missing if no backward follows or out is not rounded. The
            backward computes its row sums from out and out_residual. In rows with few visible
            keys, or with nearly all weight on one key, the rounding error of out alone would exceed
            the gradients of the scores.
    """

    out: Tensor
    lse: Any  # Tensor, or None; so are the next ones
    lse_residual: Any
    out_residual: Any

    def kernel_layout(self) -> AttentionOutputs:
        """Return the results of a forward for a backward, with strides that backwards support."""
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
    """Gradients of a call's tensors, in their dtypes; bias is empty or None if not requested."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Any  # Tensor, or None

    def without_none(self) -> AttentionGradients:
        """Return these gradients with an empty tensor in place of None."""
        query, key, value, bias = self
        return AttentionGradients(query, key, value, _or_empty(bias, query, query.dtype))


@flattens
@dataclass(eq=False)
class AttentionCall(Flat):
    """Attention: softmax(mask(scale * query @ key^T)) @ value.

    Attributes:
        query: (batch, num_heads, seqlen_q, head_dim). With packed sequences (see MaskSpec), batch
            is 1 in query, key and value.
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        mask: the visible positions, and the terms added to the scores.
        options: scale, softcap, dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskSpec
    options: AttentionOptions

    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("query", "key", "value", "bias")
    checked: ClassVar[bool] = True
    enable_gqa: ClassVar[bool] = True  # num_heads_kv divides num_heads

    def sizes(self) -> tuple[int, int, int]:
        """Return batch, seqlen_q and seqlen_k; if packed, the count and maximum lengths."""
        return self.mask.sizes(self.query, self.key)

    def kernel_layout(self) -> AttentionCall:
        """Return this call with tensors in layouts that kernels support."""
        # No generator expression: torch.compile of 2.14 restarts the trace of a backward when
        # strides are read, and fails if a generator was suspended then.
        q, k = kernel_strides(self.query), kernel_strides(self.key)
        v = kernel_strides(self.value)
        mask, options = self.mask.kernel_layout(), with_dense_offsets(self.options)
        if (
            q is self.query
            and k is self.key
            and v is self.value
            and mask is self.mask
            and options is self.options
        ):
            return self
        return replace(self, query=q, key=k, value=v, mask=mask, options=options)

    def outputs(
        self, for_backward: bool, want_lse: bool = True, empty: Empty = empty_strided
    ) -> AttentionOutputs:
        """Allocate uninitialised results; missing ones are empty."""
        query = self.query
        batch, num_heads, seqlen_q, _ = query.shape
        out = laid_out_like(query, (batch, num_heads, seqlen_q, self.value.shape[3]))
        dtype, device = statistics_dtype(query.dtype), query.device
        rows = (batch, num_heads, seqlen_q), (num_heads * seqlen_q, seqlen_q, 1)
        rounds = for_backward and query.dtype.itemsize == 2
        return AttentionOutputs(
            empty(*out, query.dtype, device),
            empty(*(rows if for_backward or want_lse else NOTHING), dtype, device),
            empty(*(rows if for_backward else NOTHING), dtype, device),
            empty(*(out if rounds else NOTHING), torch.int16, device),
        )

    def gradients(self, needs_bias: bool, empty: Empty = empty_strided) -> AttentionGradients:
        """Allocate uninitialised gradients in the layouts of their tensors; bias is contiguous."""
        query, bias = self.query, self.mask.bias
        wanted = bias if needs_bias else None
        q, k, v = (
            empty(*laid_out_like(t, t.shape), t.dtype, t.device)
            for t in (query, self.key, self.value)
        )
        return AttentionGradients(
            q,
            k,
            v,
            empty(*NOTHING, query.dtype, query.device)
            if wanted is None
            else empty(*contiguous(wanted.shape), wanted.dtype, wanted.device),
        )

    def weights(self, average: bool, empty: Empty = empty_strided) -> Tensor:
        """Allocate uninitialised weights: (batch, num_heads, seqlen_q, seqlen_k), or (batch,
        seqlen_q, seqlen_k) for their average over heads."""
        query = self.query
        return empty(*contiguous(self.weights_shape(average)), query.dtype, query.device)

    def weights_shape(self, average: bool) -> tuple[int, ...]:
        """Return the shape of `weights`."""
        batch, num_heads, seqlen_q, _ = self.query.shape
        heads = () if average else (num_heads,)
        return (batch, *heads, seqlen_q, self.key.shape[2])


class NormOutputs(NamedTuple):
    """Results of a norm's forward; missing ones are None or empty, as in AttentionOutputs.

    Attributes:
        out: (*, columns), in the dtype of input, contiguous.
        total: residual + dropout(input), as out; missing if it equals input or is not requested.
        mean: (rows,), float32 (float64 for float64); missing for RMS norms.
        rstd: (rows,), same dtype as mean.
    """

    out: Tensor
    total: Any  # Tensor, or None; so are the next ones
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
    """Gradients of a norm call; missing ones are None or empty, as in AttentionOutputs.

    Attributes:
        input: (*, columns), contiguous; missing if it equals that of `total` (no dropout).
        total: (*, columns), contiguous; gradient of residual + dropout(input), and of residual.
        weight, bias: (columns,) in the dtype of rstd; missing if not requested.
    """

    input: Any  # Tensor, or None; so are weight and bias
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
    """Layer norm or RMS norm: norm(residual + dropout(input)) of each row.

    Attributes:
        input: (*, columns); all leading dimensions are rows.
        residual: as input, or None.
        weight, bias: (columns,), or None.
        options: eps, type of norm, dropout.
    """

    input: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    options: NormOptions

    DIFFERENTIABLE: ClassVar[tuple[str, ...]] = ("input", "residual", "weight", "bias")
    checked: ClassVar[bool] = True

    @property
    def normalized_shape(self) -> tuple[int]:
        """Shape of the normalised dimension: (columns,)."""
        return (self.input.shape[-1],)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.input.shape[:-1])

    @property
    def has_total(self) -> bool:
        """True if the norm is applied to something other than input."""
        return self.residual is not None or self.options.dropout_p > 0.0

    def kernel_layout(self) -> NormCall:
        """Return this call in layouts that kernels support (see `rows_in_place`).

        Parameters become contiguous, in the dtype of the statistics.
        """
        own, dtype = self.input.dtype, statistics_dtype(self.input.dtype)
        input, residual = rows_in_place(self.input), self.residual
        if residual is not None:
            residual = rows_in_place(residual.to(own))
        weight, bias = _dense(self.weight, dtype), _dense(self.bias, dtype)
        options = with_dense_offsets(self.options)
        if (
            input is self.input
            and residual is self.residual
            and weight is self.weight
            and bias is self.bias
            and options is self.options
        ):
            return self
        return NormCall(input, residual, weight, bias, options)

    def contiguous_call(self) -> NormCall:
        """Return this call with contiguous tensors, in the dtypes that kernels support."""
        own, dtype = self.input.dtype, statistics_dtype(self.input.dtype)
        return NormCall(
            self.input.contiguous().resolve_neg(),
            _dense(self.residual, own),
            _dense(self.weight, dtype),
            _dense(self.bias, dtype),
            with_dense_offsets(self.options),
        )

    def of_total(self, total: Tensor) -> NormCall:
        """Return the call for the backward: `total` as the input, and no residual."""
        return NormCall(total, None, self.weight, self.bias, self.options)

    def outputs(self, empty: Empty = empty_strided) -> NormOutputs:
        """Allocate uninitialised results."""
        like = self.input
        rows, dtype = self.rows, statistics_dtype(like.dtype)
        matrix = contiguous(like.shape)
        return NormOutputs(
            empty(*matrix, like.dtype, like.device),
            empty(*(matrix if self.has_total else NOTHING), like.dtype, like.device),
            empty((0 if self.options.rms else rows,), (1,), dtype, like.device),
            empty((rows,), (1,), dtype, like.device),
        )

    def gradients(
        self, needs_weight: bool, needs_bias: bool, empty: Empty = empty_strided
    ) -> NormGradients:
        """Allocate uninitialised gradients."""
        like = self.input
        columns, dtype = like.shape[-1], statistics_dtype(like.dtype)
        matrix = contiguous(like.shape)
        return NormGradients(
            empty(*(matrix if self.options.dropout_p > 0.0 else NOTHING), like.dtype, like.device),
            empty(*matrix, like.dtype, like.device),
            empty((columns if needs_weight else 0,), (1,), dtype, like.device),
            empty((columns if needs_bias else 0,), (1,), dtype, like.device),
        )


CallT = TypeVar("CallT", AttentionCall, NormCall)


def with_options(call: CallT, **options: Any) -> CallT:
    """Return the call with the given options replaced."""
    return replace(call, options=replace(call.options, **options))


def _or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor, or an empty one on the device of `like`."""
    return like.new_empty(0, dtype=dtype) if tensor is None else tensor


def _dense(tensor: Any, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype).contiguous().resolve_neg()
