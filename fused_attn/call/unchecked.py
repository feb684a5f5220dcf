"""Unvalidated calls, as the public functions receive them.

A backend's forward pass either runs such a call or returns None. On None, validation
(call/validation.py) raises the error or returns the validated call, and the pass runs that. Most
small calls never reach validation, which takes longer than their kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Parameter

from fused_attn.base import philox
from fused_attn.base.autocast import any_autocast, autocast, autocast_norm
from fused_attn.call.calls import AttentionCall, NormCall, default_eps, default_scale
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, spec_of

_TENSORS = frozenset({Tensor, Parameter})
_TENSORS_OR_NONE = _TENSORS | {type(None)}
_NUMBERS = frozenset({float, int})


class UncheckedAttention:
    """The arguments of `scaled_dot_product_attention` or `varlen_attention`, not validated.

    It has every attribute that a pass reads from an AttentionCall.

    Attributes:
        query, key, value, dropout_p, is_causal, scale, enable_gqa, softcap, seed: as given. Packed
            sequences are (total, num_heads, head_dim).
        attn_mask: as given, or a MaskSpec for exactly this call. Packed sequences need a MaskSpec,
            whose cu_seqlens are validated.
        mask: the MaskSpec that `resolve_mask` derived from attn_mask.
    """

    __slots__ = (
        "attn_mask", "dropout_p", "enable_gqa", "is_causal", "key", "mask", "query", "scale",
        "seed", "softcap", "value",
    )  # fmt: skip
    checked: ClassVar[bool] = False
    dropout_origin: ClassVar[None] = None

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | Mask | MaskSpec | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        softcap: float | None,
        seed: int | Tensor | None,
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self.attn_mask = attn_mask
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.softcap = softcap
        self.seed: Any = seed
        self.mask: Any = None

    def prepare(self) -> bool:
        """Set the default scale and cast tensors under autocast; False if validation is needed."""
        query, dropout_p, softcap = self.query, self.dropout_p, self.softcap
        if not _TENSORS.issuperset((type(query), type(self.key), type(self.value))):
            return False
        if (
            query.is_nested
            or query.dim() < 2
            or type(self.is_causal) is not bool
            or self.seed is not None
        ):
            return False
        if type(dropout_p) not in _NUMBERS or not 0.0 <= dropout_p <= 1.0:
            return False
        if softcap is not None and not (type(softcap) in _NUMBERS and 0.0 < softcap < math.inf):
            return False
        if self.scale is None:
            self.scale = default_scale(query.shape[-1])
        elif type(self.scale) not in _NUMBERS:
            return False
        if any_autocast():
            self.query, self.key, self.value = autocast(query, self.key, self.value)
        return True

    def resolve_mask(self) -> MaskSpec | None:
        """Return the MaskSpec of attn_mask and is_causal; None if validation is needed."""
        given = self.attn_mask
        if self.mask is None:
            self.mask = (
                given
                if isinstance(given, MaskSpec)
                else spec_of(given, self.is_causal, self.query, self.key)
            )
        return self.mask

    def sizes(self) -> tuple[int, int, int]:
        """batch, seqlen_q and seqlen_k of 4-D tensors, as `AttentionCall.sizes`."""
        return self.mask.sizes(self.query, self.key)

    def draw_seed(self) -> Tensor:
        """Draw the dropout seed; a pass calls this once it has accepted the call."""
        self.seed = philox.new_seed(self.query.device)
        return self.seed

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of `AttentionCall.TENSORS`."""
        return (self.query, self.key, self.value, *self.mask.tensors(), self.seed, None)

    def without_tensors(self) -> AttentionCall:
        """The AttentionCall without its tensors, for the backward."""
        nothing: Any = None
        mask, softcap = self.mask.without_tensors(), self.softcap or 0.0
        rest = (float(self.scale), softcap, float(self.dropout_p))  # type: ignore[arg-type]
        return AttentionCall(nothing, nothing, nothing, mask, *rest)


class UncheckedNorm:
    """The arguments of `layer_norm` or `rms_norm`, not validated.

    It has every attribute that a pass reads from a NormCall.

    Attributes:
        input, weight, bias, eps, residual, dropout_p, seed: as given.
        normalized_shape: as given, as a tuple.
        rms: True for `rms_norm`.
    """

    __slots__ = (
        "bias", "dropout_p", "eps", "input", "normalized_shape", "residual", "rms", "seed",
        "weight",
    )  # fmt: skip
    checked: ClassVar[bool] = False
    dropout_origin: ClassVar[None] = None

    def __init__(
        self,
        input: Tensor,
        normalized_shape: int | Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
        rms: bool,
        residual: Tensor | None,
        dropout_p: float,
        seed: int | Tensor | None,
    ) -> None:
        self.input = input
        self.normalized_shape: tuple[int, ...] = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.rms = rms
        self.residual = residual
        self.dropout_p = dropout_p
        self.seed: Any = seed

    @property
    def has_total(self) -> bool:
        """True if something else than input is normalized."""
        return self.residual is not None or self.dropout_p > 0.0

    def prepare(self) -> bool:
        """Set the default eps and cast under autocast; False if validation is needed."""
        input, dropout_p = self.input, self.dropout_p
        if type(input) not in _TENSORS or not _TENSORS_OR_NONE.issuperset(
            (type(self.weight), type(self.bias), type(self.residual))
        ):
            return False
        if type(dropout_p) not in _NUMBERS or not 0.0 <= dropout_p <= 1.0 or self.seed is not None:
            return False
        if any_autocast():
            self.input, self.residual = autocast_norm(input, self.residual)
        if self.eps is None:
            self.eps = default_eps(self.input.dtype)
        return type(self.eps) is float

    def draw_seed(self) -> Tensor:
        """Draw the dropout seed; a pass calls this once it has accepted the call."""
        self.seed = philox.new_seed(self.input.device)
        return self.seed

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of `NormCall.TENSORS`."""
        return (self.input, self.residual, self.weight, self.bias, self.seed, None)

    def without_tensors(self) -> NormCall:
        """The NormCall without its tensors, for the backward."""
        nothing: Any = None
        eps: Any = self.eps
        return NormCall(nothing, None, None, None, eps, self.rms, float(self.dropout_p))
