"""Unchecked calls, which hold the arguments of the public functions before validation.

A backend first runs its forward on the unchecked call. If it returns None, call/validation.py
either raises an error or returns a validated call, which the backend then runs. Most small calls
skip validation this way, because it takes longer than their kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fused_attn.base import philox
from fused_attn.base.autocast import any_autocast, autocast, autocast_norm
from fused_attn.call.calls import AttentionCall, NormCall
from fused_attn.call.options import AttentionOptions, NormOptions
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, spec_of

_TENSORS = frozenset({Tensor, Parameter})
_TENSORS_OR_NONE = _TENSORS | {type(None)}


class UncheckedAttention:
    """Unvalidated arguments of `scaled_dot_product_attention` or `varlen_attention`.

    The class has all attributes of AttentionCall that a backend's forward reads.

    Attributes:
        query, key, value, is_causal, enable_gqa, options: as passed by the caller. Packed sequences
            have shape (total, num_heads, head_dim).
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
        self.attn_mask = attn_mask
        self.is_causal = is_causal
        self.enable_gqa = enable_gqa
        self.options = options
        self.mask: Any = None

    def prepare(self) -> bool:
        """Set the default scale, and cast tensors under autocast.

        Returns:
            False if the call needs validation.
        """
        query = self.query
        if not _TENSORS.issuperset((type(query), type(self.key), type(self.value))):
            return False
        if query.is_nested or query.dim() < 2 or type(self.is_causal) is not bool:
            return False
        if any_autocast():
            self.query, self.key, self.value = autocast(query, self.key, self.value)
        return self.options.prepare(query.shape[-1])

    def resolve_mask(self) -> MaskSpec | None:
        """Return the MaskSpec of attn_mask and is_causal, or None if the call needs validation."""
        if self.mask is None:
            mask = self.attn_mask
            if not isinstance(mask, MaskSpec):
                mask = spec_of(mask, self.is_causal, self.query, self.key)
            self.mask = mask
        return self.mask

    @property
    def is_packed(self) -> bool:
        """True if the call has packed sequences."""
        mask = self.attn_mask
        return isinstance(mask, MaskSpec) and mask.cu_seqlens_q is not None

    def with_batch(self) -> UncheckedAttention:
        """Return a packed call with tensors (1, num_heads, total, head_dim), as a backward needs.

        It has the same options object.
        """
        query, key, value = (t.transpose(0, 1)[None] for t in (self.query, self.key, self.value))
        call = UncheckedAttention(query, key, value, self.attn_mask, False, True, self.options)
        call.mask = self.mask
        return call

    def is_resolved(self) -> bool:
        """Return True if the call has 4-D tensors and a MaskSpec, as `validated` requires."""
        tensors = self.query, self.key, self.value
        return all(t.dim() == 4 for t in tensors) and self.resolve_mask() is not None

    def draw_seed(self) -> Tensor:
        """Draw a dropout seed, store it in the options and return it.

        A backend calls this method after it has accepted the call.
        """
        seed = self.options.seed = philox.new_seed(self.query.device)
        return seed

    def validated(self) -> AttentionCall:
        """Return the AttentionCall for the backward, once a backend has accepted this call."""
        return AttentionCall(self.query, self.key, self.value, self.mask, self.options.validated())


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
        if type(self.input) not in _TENSORS or not _TENSORS_OR_NONE.issuperset(
            (type(self.weight), type(self.bias), type(self.residual))
        ):
            return False
        if any_autocast():
            self.input, self.residual = autocast_norm(self.input, self.residual)
        return self.options.prepare(self.input.dtype)

    def is_resolved(self) -> bool:
        """Return True if the call has one normalized dimension, as `validated` requires."""
        return len(self.normalized_shape) == 1

    def draw_seed(self) -> Tensor:
        """Draw a dropout seed, store it in the options and return it.

        A backend calls this method after it has accepted the call.
        """
        seed = self.options.seed = philox.new_seed(self.input.device)
        return seed

    def validated(self) -> NormCall:
        """Return the NormCall for the backward, once a backend has accepted this call."""
        return NormCall(self.input, self.residual, self.weight, self.bias, self.options.validated())
