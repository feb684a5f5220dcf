"""Conversion of masks to arguments of torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fused_attn.base.torch_state import host_readable, is_compiling, savable, statistics_dtype
from fused_attn.masks.fields import DIMENSIONS, Shape, refuse_unknown_fields
from fused_attn.masks.mask import UNLIMITED, Mask
from fused_attn.masks.materialize import materialize
from fused_attn.masks.memo import recall, recall_on_tensor
from fused_attn.masks.spec import MaskSpec, bias_fits, spec_of_mask
from fused_attn.masks.tensors import as_mask

# Maximum number of cached values per tensor and its slices. Each may be as large as the tensor.
_MAX_CACHED = 8


class TorchArguments(NamedTuple):
    """Mask arguments for torch's scaled_dot_product_attention, and the fully masked rows.

    Attributes:
        attn_mask: bool, or float in the dtype of query, broadcastable to (batch, num_heads,
            seqlen_q, seqlen_k). Fully masked rows are made visible in it. None if every position is
            visible or is_causal is True.
        is_causal: apply a top-left causal mask, as in torch; never combined with attn_mask.
        empty: bool, broadcastable to (batch, num_heads, seqlen_q, 1), True for query rows that are
            fully masked. The caller must set their output to 0. None if there are no such rows.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    empty: Tensor | None = None


def arguments_of(
    attn_mask: Tensor | Mask, is_causal: bool, query: Tensor, key: Tensor
) -> TorchArguments | None:
    """Return torch's arguments for an unvalidated `attn_mask`; None if validation is needed.

    The result is cached on attn_mask. The call must not be intercepted.

    Args:
        attn_mask: a Mask, a bool tensor (True = attend), or a float tensor.
        is_causal: combine attn_mask with a top-left causal mask.
        query, key: 4-D; only their shapes, dtype and device are used.
    """
    batch, num_heads, seqlen_q, _ = query.shape
    shape = (batch, num_heads, seqlen_q, key.shape[2])

    def spec() -> MaskSpec:
        made = spec_of_mask(as_mask(attn_mask, is_causal), *shape, query.device)
        refuse_unknown_fields(made, "sdpa")
        if not bias_fits(made, query.dtype):
            raise ValueError  # caught below; validation raises it again, with a message
        return made

    memo_key = ("torch", shape, query.dtype, query.device, is_causal)
    try:
        if isinstance(attn_mask, Mask):
            memo, tensors = attn_mask.memo, attn_mask.tensors()
            return recall(
                memo, memo_key, tensors, query.device, lambda: _arguments(spec(), shape, query)
            )
        if type(attn_mask) is not Tensor or attn_mask.is_neg():
            return None
        if not savable(attn_mask):
            return None
        return _of_tensor(attn_mask, memo_key, spec, shape, query)
    except (TypeError, ValueError):  # validation may report an error in another argument first
        return None


def torch_arguments(spec: MaskSpec, shape: Shape, query: Tensor) -> TorchArguments:
    """Return torch's arguments that are equivalent to a MaskSpec, cached on the spec's tensors.

    Args:
        shape: (batch, num_heads, seqlen_q, seqlen_k).
        query: only its dtype and device are used.
    """
    refuse_unknown_fields(spec, "sdpa")
    tensors = [t for t in spec.tensors() if t is not None]
    numbers = (spec.band_lo, spec.band_hi, spec.alibi_offset, spec.by_query)
    memo_key = ("torch", shape, query.dtype, query.device, numbers)
    mask_tensor = _tensor_of(spec)
    if mask_tensor is not None and len(tensors) == 1:
        return _of_tensor(mask_tensor, memo_key, lambda: spec, shape, query)

    def compute() -> TorchArguments:
        return _arguments(spec, shape, query)

    if tensors:
        return recall_on_tensor(tensors[0], memo_key, tensors, compute, _MAX_CACHED)
    return recall(spec.own_memo(), memo_key, tensors, query.device, compute)


def _of_tensor(
    tensor: Tensor, memo_key: Hashable, spec: Callable[[], MaskSpec], shape: Shape, query: Tensor
) -> TorchArguments:
    """Return torch's arguments for a mask that is a single tensor, cached on the caller's tensor.

    A cached value must not reference the tensor, so None is cached if torch accepts the tensor
    unchanged.
    """

    def compute() -> TorchArguments | None:
        of = spec()
        arguments = _arguments(of, shape, query)
        return None if arguments.attn_mask is _tensor_of(of) else arguments

    cached = recall_on_tensor(tensor, memo_key, (tensor,), compute, _MAX_CACHED)
    if cached is not None:
        return cached
    # torch's fused kernels accept only 2-D and 4-D masks.
    of_rank = tensor.dim() in (2, 4)
    return TorchArguments(tensor if of_rank else tensor[(None,) * (4 - tensor.dim())])


def _tensor_of(spec: MaskSpec) -> Tensor | None:
    return next((t for t in (spec.dense, spec.key_mask, spec.bias) if t is not None), None)


def _arguments(spec: MaskSpec, shape: Shape, query: Tensor) -> TorchArguments:
    if all(tensor is None for tensor in spec.tensors()):
        lo_masks, hi_masks = spec.band_lo > -UNLIMITED, spec.band_hi < UNLIMITED
        if not is_compiling():  # a comparison with symbolic sizes would add a guard
            lo_masks = lo_masks and spec.band_lo > 1 - shape[2]
            hi_masks = hi_masks and spec.band_hi < shape[3] - 1
        if not lo_masks and not hi_masks:
            return TorchArguments()
        if not lo_masks and spec.band_hi == 0:
            return TorchArguments(is_causal=True)
    lowest = float("-inf")
    visible: Tensor | None = None
    empty: Tensor | None
    if spec.bias is not None and replace(spec, bias=None).kind == "none":
        bias: Tensor | None = spec.bias
        empty = (spec.bias == lowest).all(-1, keepdim=True)
    else:
        visible, bias = materialize(spec, *shape, query.device, statistics_dtype(query.dtype))
        empty = None if visible is None else ~visible.any(-1, keepdim=True)
    if empty is not None and (
        _no_row_fully_masked(spec, shape) or (host_readable(empty) and not empty.any())
    ):
        empty = None
    if bias is None:
        nonempty_rows = visible if visible is None or empty is None else visible | empty
        return TorchArguments(nonempty_rows, empty=empty)
    if visible is not None:
        bias = bias.masked_fill(~visible, lowest)
    if empty is not None:
        bias = bias.masked_fill(empty, 0.0)
    return TorchArguments(bias.to(query.dtype), empty=empty)


def _no_row_fully_masked(spec: MaskSpec, shape: Shape) -> bool:
    """Return True if every query row has a visible key, without reading tensor values."""
    others = DIMENSIONS.keys() - {"slopes"}  # slopes add to the scores, but mask nothing
    if any(getattr(spec, name) is not None for name in others):
        return False
    if spec.band_lo <= -UNLIMITED:
        return spec.band_hi >= 0
    if is_compiling():
        return False
    return spec.band_hi >= 0 and shape[2] - 1 + spec.band_lo <= shape[3] - 1
