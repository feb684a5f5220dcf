"""Norm calls as objects: unvalidated and validated arguments, options, and results.

See call/attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fused_attn.base import philox
from fused_attn.base.autocast import any_autocast, autocast_norm
from fused_attn.base.flat import Flat, empty_strided, flattens, or_empty
from fused_attn.base.layout import EMPTY_LAYOUT, contiguous, rows_in_place
from fused_attn.base.torch_state import PLAIN_TYPES, TENSOR_TYPES, statistics_dtype
from fused_attn.call.options import (
    NUMBERS,
    checked_number,
    checked_probability,
    checked_seed,
    with_dense_offsets,
)


def default_eps(dtype: torch.dtype) -> float:
    """Return the default eps of RMS norms, as in torch: the statistics dtype's machine epsilon."""
    return torch.finfo(statistics_dtype(dtype)).eps


@flattens
@dataclass(eq=False)
class NormOptions(Flat):
    """Options of a norm call.

    In an unchecked call, the values are those that the caller passed.

    Attributes:
        eps: added to the variance, or to the mean square of an RMS norm. None in an unchecked call
            means the default.
        rms: True for RMS norm, False for layer norm.
        dropout_p: probability of dropping an element of input.
        seed: int64 scalar tensor, required if dropout_p > 0. In an unchecked call, it may be an
            int or None.
        dropout_offsets: int64 (runs,), global index of the first row of each run (see
            distributed/dtensors.py). A run has rows / runs rows. None if the call is not a shard of
            a global call.
    """

    eps: float
    rms: bool
    dropout_p: float = 0.0
    seed: Tensor | None = None
    dropout_offsets: Tensor | None = None

    def prepare(self, dtype: torch.dtype) -> bool:
        """Set the default eps of an unchecked call, and return True if all options are valid.

        Returns False if `checked` must convert or reject an option, or if a seed is given.
        """
        if self.eps is None and self.rms:
            self.eps = default_eps(dtype)
        dropout_p = self.dropout_p
        if type(self.eps) is not float or type(dropout_p) not in NUMBERS:
            return False
        return 0.0 <= dropout_p <= 1.0 and self.seed is None

    def checked(self, dtype: torch.dtype, device: torch.device) -> NormOptions:
        """Validate and convert the options of an unchecked call."""
        eps: Any = self.eps
        dropout_p = checked_probability(self.dropout_p)
        return NormOptions(
            default_eps(dtype) if eps is None and self.rms else checked_number("eps", eps),
            self.rms,
            dropout_p,
            checked_seed(self.seed, dropout_p, device),
        )

    def assume_checked(self) -> NormOptions:
        """Return the options in the form that `checked` returns, without checking them."""
        return NormOptions(self.eps, self.rms, float(self.dropout_p), self.seed)


class UncheckedNorm:
    """Unvalidated arguments of `layer_norm` or `rms_norm`.

    The class has all attributes of NormCall that a backend's forward reads.

    Attributes:
        input, weight, bias, residual, options: as passed by the caller.
        normalized_shape: as passed by the caller, converted to a tuple.
    """

    __slots__ = ("bias", "input", "normalized_shape", "options", "residual", "weight")

    def __init__(
        self,
        input: Tensor,
        normalized_shape: int | Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        options: NormOptions,
    ) -> None:
        self.input = input
        self.normalized_shape: tuple[int, ...] = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.weight = weight
        self.bias = bias
        self.residual = residual
        self.options = options

    @property
    def has_total(self) -> bool:
        """True if the call has a residual or dropout, so the sum differs from input."""
        return self.residual is not None or self.options.dropout_p > 0.0

    def prepare(self) -> bool:
        """Set the default eps, and cast input and residual under autocast.

        Returns:
            False if the call needs validation.
        """
        if type(self.input) not in TENSOR_TYPES or not PLAIN_TYPES.issuperset(
            (type(self.weight), type(self.bias), type(self.residual))
        ):
            return False
        if any_autocast():
            self.input, self.residual = autocast_norm(self.input, self.residual)
        return self.options.prepare(self.input.dtype)

    def resolve(self) -> bool:
        """Return True if `assume_checked` may follow: the call has one normalized dimension."""
        return len(self.normalized_shape) == 1

    def draw_seed(self) -> Tensor:
        """Draw a dropout seed, store it in the options and return it.

        A backend calls this method after it has accepted the call.
        """
        seed = self.options.seed = philox.new_seed(self.input.device)
        return seed

    def assume_checked(self) -> NormCall:
        """Return the NormCall with the same arguments, without checking them."""
        options = self.options.assume_checked()
        return NormCall(self.input, self.residual, self.weight, self.bias, options)


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

    def outputs(self) -> NormOutputs:
        """Allocate uninitialized results; missing results are empty tensors."""
        like = self.input
        rows, dtype = self.rows, statistics_dtype(like.dtype)
        matrix = contiguous(like.shape)
        return NormOutputs(
            empty_strided(*matrix, like.dtype, like.device),
            empty_strided(*(matrix if self.has_total else EMPTY_LAYOUT), like.dtype, like.device),
            empty_strided((0 if self.options.rms else rows,), (1,), dtype, like.device),
            empty_strided((rows,), (1,), dtype, like.device),
        )

    def gradients(self, needs_weight: bool, needs_bias: bool) -> NormGradients:
        """Allocate uninitialized gradients; missing gradients are empty tensors."""
        like = self.input
        columns, dtype = like.shape[-1], statistics_dtype(like.dtype)
        matrix = contiguous(like.shape)
        return NormGradients(
            empty_strided(
                *(matrix if self.options.dropout_p > 0.0 else EMPTY_LAYOUT), like.dtype, like.device
            ),
            empty_strided(*matrix, like.dtype, like.device),
            empty_strided((columns if needs_weight else 0,), (1,), dtype, like.device),
            empty_strided((columns if needs_bias else 0,), (1,), dtype, like.device),
        )


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
        own, dtype = self.out.dtype, statistics_dtype(self.out.dtype)
        return or_empty(self, self.out, total=own, mean=dtype, rstd=dtype)


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
        own, dtype = self.total.dtype, statistics_dtype(self.total.dtype)
        return or_empty(self, self.total, input=own, weight=dtype, bias=dtype)


class NormBackward(NamedTuple):
    """A backward of a norm.

    Attributes:
        call: the call of the forward, whose input is replaced by the sum residual + dropout(input),
            and which has no residual.
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


def _dense(tensor: Any, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype).contiguous().resolve_neg()
