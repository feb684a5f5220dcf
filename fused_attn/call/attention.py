"""Attention calls as objects: unvalidated and validated arguments, options, and results.

The public functions pass an UncheckedAttention. A backend with accepts_unchecked runs it directly,
because validation takes longer than a small kernel. If there is no such backend or it returns None,
call/validation.py raises an error, or returns an AttentionCall for the backend that `select`
returns.

AttentionCall also computes the shapes and strides of outputs and gradients, for the backends and
the fake implementations of the ops. The C++ module for CPUs computes the same shapes and strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fused_attn.base import philox
from fused_attn.base.autocast import any_autocast, autocast
from fused_attn.base.flat import Empty, Flat, empty_strided, flattens, or_empty
from fused_attn.base.layout import EMPTY_LAYOUT, contiguous, kernel_strides, laid_out_like
from fused_attn.base.torch_state import TENSOR_TYPES, statistics_dtype
from fused_attn.call.options import (
    NUMBERS,
    checked_number,
    checked_probability,
    checked_seed,
    with_dense_offsets,
)
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, spec_of


def default_scale(head_dim: int) -> float:
    """Return the default softmax scale, 1 / sqrt(head_dim); 1 if head_dim is 0."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


@flattens
@dataclass(eq=False)
class AttentionOptions(Flat):
    """Options of an attention call.

    In an unchecked call, the values are those that the caller passed.

    Attributes:
        scale: factor of query @ key^T. None in an unchecked call means the default.
        softcap: if not 0, scores become softcap * tanh(scores / softcap). None in an unchecked call
            means no softcap.
        dropout_p: probability of dropping an attention weight.
        seed: int64 scalar tensor, required if dropout_p > 0. In an unchecked call, it may be an
            int or None.
        dropout_offsets: int64 (batch, 3), global offsets (row, key, head) of each sequence (see
            distributed/sharding.py). None if the call is not a shard of a global call.
        partial: True if the result covers only some of the keys, and the caller merges it with
            others. out and all gradients then have the statistics dtype (float32 for 16-bit
            tensors), and the backward receives the merged out and lse.
        decoding: True if the queries are the last rows of sequences of any length. The number of
            queries alone then determines the kernel, so the result of a sequence is bitwise
            independent of the lengths of others.
    """

    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: Tensor | None = None
    dropout_offsets: Tensor | None = None
    partial: bool = False
    decoding: bool = False

    def prepare(self, head_dim: int) -> bool:
        """Set the default scale of an unchecked call, and return True if all options are valid.

        Returns False if `checked` must convert or reject an option, or if a seed is given.
        """
        scale: Any = self.scale
        softcap: Any = self.softcap
        if scale is None:
            self.scale = default_scale(head_dim)
        elif type(scale) not in NUMBERS:
            return False
        if softcap is not None and not (type(softcap) in NUMBERS and 0.0 < softcap < math.inf):
            return False
        dropout_p = self.dropout_p
        return type(dropout_p) in NUMBERS and 0.0 <= dropout_p <= 1.0 and self.seed is None

    def checked(self, head_dim: int, device: torch.device) -> AttentionOptions:
        """Validate and convert the options of an unchecked call."""
        scale: Any = self.scale
        softcap: Any = self.softcap
        if softcap is not None:
            softcap = checked_number("softcap", softcap)
            if not softcap > 0.0 or math.isinf(softcap):
                raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
        dropout_p = checked_probability(self.dropout_p)
        return AttentionOptions(
            default_scale(head_dim) if scale is None else checked_number("scale", scale),
            0.0 if softcap is None else softcap,
            dropout_p,
            checked_seed(self.seed, dropout_p, device),
            partial=self.partial,
            decoding=self.decoding,
        )

    def assume_checked(self) -> AttentionOptions:
        """Return the options in the form that `checked` returns, without checking them."""
        return AttentionOptions(
            float(self.scale),
            self.softcap or 0.0,
            float(self.dropout_p),
            self.seed,
            decoding=self.decoding,
        )


class UncheckedAttention:
    """Unvalidated arguments of an attention function.

    The class has all attributes of AttentionCall that a backend's forward reads.

    Attributes:
        query, key, value, is_causal, enable_gqa, options: as passed by the caller, until `prepare`
            and `draw_seed` change them. Packed sequences have shape (total, num_heads, head_dim).
        attn_mask: as passed by the caller, or a MaskSpec that fits the call. Packed sequences need
            a MaskSpec with validated cu_seqlens.
        mask: the MaskSpec that `resolve_mask` derived from attn_mask and is_causal, or None.
    """

    __slots__ = (
        "attn_mask", "enable_gqa", "is_causal", "key", "mask", "options", "query", "value",
    )  # fmt: skip

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | Mask | MaskSpec | None,
        is_causal: bool,
        enable_gqa: bool,
        options: AttentionOptions,
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self.attn_mask: Any = attn_mask
        self.is_causal = is_causal
        self.enable_gqa = enable_gqa
        self.options = options
        self.mask: Any = attn_mask if isinstance(attn_mask, MaskSpec) else None

    def prepare(self) -> bool:
        """Set the default scale, and cast tensors under autocast.

        Returns:
            False if the call needs validation.
        """
        query = self.query
        if not TENSOR_TYPES.issuperset((type(query), type(self.key), type(self.value))):
            return False
        if query.is_nested or query.dim() < 2 or type(self.is_causal) is not bool:
            return False
        if any_autocast():
            self.query, self.key, self.value = autocast(query, self.key, self.value)
        return self.options.prepare(query.shape[-1])

    def resolve_mask(self) -> MaskSpec | None:
        """Return the MaskSpec of attn_mask and is_causal, or None if the call needs validation."""
        if self.mask is None:
            self.mask = spec_of(self.attn_mask, self.is_causal, self.query, self.key)
        return self.mask

    @property
    def is_packed(self) -> bool:
        """True if the call has packed sequences."""
        mask = self.attn_mask
        return isinstance(mask, MaskSpec) and mask.cu_seqlens_q is not None

    def with_batch(self) -> UncheckedAttention:
        """Return this packed call with tensors (1, num_heads, total, head_dim), for the backward.

        Both calls share one options object.
        """
        query, key, value = (t.transpose(0, 1)[None] for t in (self.query, self.key, self.value))
        return UncheckedAttention(query, key, value, self.attn_mask, False, True, self.options)

    def resolve(self) -> bool:
        """Derive the MaskSpec; return True if `assume_checked` may follow, for 4-D tensors."""
        tensors = self.query, self.key, self.value
        return all(t.dim() == 4 for t in tensors) and self.resolve_mask() is not None

    def draw_seed(self) -> Tensor:
        """Draw a dropout seed, store it in the options and return it.

        A backend calls this method after it has accepted the call.
        """
        seed = self.options.seed = philox.new_seed(self.query.device)
        return seed

    def assume_checked(self) -> AttentionCall:
        """Return the AttentionCall with the same arguments, without checking them."""
        return AttentionCall(
            self.query, self.key, self.value, self.mask, self.options.assume_checked()
        )


@flattens
@dataclass(eq=False)
class AttentionCall(Flat):
    """Attention call in the form that kernels need: softmax(mask(scale * query @ key^T)) @ value.

    Validation or `UncheckedAttention.assume_checked` creates it.

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

    def without_value(self) -> AttentionCall:
        """Return the call with an empty value, which attention weights do not need."""
        return replace(self, value=self.key.new_empty(*self.key.shape[:3], 0))

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

        The gradients of query, key and value have the memory order of their tensors. The gradient
        of bias is contiguous, or empty without needs_bias.
        """
        query, bias = self.query, self.mask.bias
        q, k, v = (
            empty(*laid_out_like(t, t.shape), self.out_dtype, t.device)
            for t in (query, self.key, self.value)
        )
        layout, dtype = EMPTY_LAYOUT, query.dtype
        if needs_bias and bias is not None:
            layout = contiguous(bias.shape)
            dtype = self.out_dtype if self.options.partial else bias.dtype
        return AttentionGradients(q, k, v, empty(*layout, dtype, query.device))

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


class AttentionOutputs(NamedTuple):
    """Results of an attention forward.

    A missing result is None. It is an empty tensor in the ops of torch.library, and in the results
    that `AttentionCall.outputs` allocates for kernels. The results of an unchecked packed call have
    the caller's shapes.

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
        dtype = statistics_dtype(self.out.dtype)
        return or_empty(self, self.out, lse=dtype, lse_residual=dtype, out_residual=torch.int16)


class AttentionGradients(NamedTuple):
    """Gradients of an attention call, each in the shape and dtype of its tensor.

    For a partial result, all have the statistics dtype. If the gradient of bias is not requested,
    it is None, or an empty tensor in torch.library ops.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Any  # Tensor | None

    def without_none(self) -> AttentionGradients:
        """Return these gradients with an empty tensor in place of None."""
        return or_empty(self, self.query, bias=self.query.dtype)


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
