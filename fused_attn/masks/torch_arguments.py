"""Masks as torch's own scaled_dot_product_attention takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_attn.core.torch_state import plain_eager, readable, statistics_dtype
from fused_attn.masks.mask import UNLIMITED
from fused_attn.masks.materialize import materialize
from fused_attn.masks.memo import Memo, recall, recall_of
from fused_attn.masks.spec import MaskSpec

Shape = tuple[int, int, int, int]

_KEPT = 8  # of a tensor and its slices: each may be as large


class TorchArguments(NamedTuple):
    """The arguments `attn_mask` and `is_causal`, and the rows that see nothing.

    Attributes:
        attn_mask: bool or in the type of query, broadcastable to (batch, num_heads, seqlen_q,
            seqlen_k); each row sees something. None where all is visible, or is_causal says it.
        is_causal: as torch has it, top-left; never with attn_mask.
        empty: bool, broadcastable to (batch, num_heads, seqlen_q, 1): the rows that see nothing in
            truth, to be filled with 0. None where there is none.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    empty: Tensor | None = None


def torch_arguments(spec: MaskSpec, shape: Shape, query: Tensor) -> TorchArguments:
    """The arguments that say what the spec says, kept where the spec's tensors are.

    Args:
        shape: (batch, num_heads, seqlen_q, seqlen_k).
        query: its type and device count.
    """
    tensors = [t for t in spec.tensors() if t is not None]
    if not tensors:
        lo_hides, hi_hides = _limits_that_hide(spec, shape)
        if not lo_hides and not hi_hides:
            return TorchArguments()
        if not lo_hides and spec.band_hi == 0:
            return TorchArguments(is_causal=True)
    key = ("torch", shape, query.dtype, spec.band_lo, spec.band_hi)
    whole = next((t for t in (spec.dense, spec.key_mask, spec.bias) if t is not None), None)
    if whole is None or len(tensors) > 1:
        memo: Memo = vars(spec).setdefault("memo", {})
        return recall(memo, key, tensors, query.device, lambda: _arguments(spec, shape, query))
    if whole.requires_grad or not plain_eager(whole):
        return _arguments(spec, shape, query)
    # A tensor of the caller, or a view of one, which comes with a new spec each time. What is kept
    # under it must not hold it: None stands for it.
    owner = whole if whole._base is None else whole._base

    def without() -> TorchArguments:
        made = _arguments(spec, shape, query)
        return made._replace(attn_mask=None) if made.attn_mask is whole else made

    place = (whole.shape, whole.stride(), whole.data_ptr())
    kept = recall_of(owner, (key, place), [owner], without, _KEPT)
    return kept._replace(attn_mask=whole) if kept.attn_mask is None else kept


def _limits_that_hide(spec: MaskSpec, shape: Shape) -> tuple[bool, bool]:
    """Whether each limit of the band hides something; a graph takes it so, or would be guarded."""
    lo, hi = spec.band_lo > -UNLIMITED, spec.band_hi < UNLIMITED
    if torch.compiler.is_compiling():
        return lo, hi
    return lo and spec.band_lo > 1 - shape[2], hi and spec.band_hi < shape[3] - 1


def _arguments(spec: MaskSpec, shape: Shape, query: Tensor) -> TorchArguments:
    lowest = float("-inf")
    visible: Tensor | None = None
    empty: Tensor | None
    if spec.bias is not None and not spec.hides():
        bias: Tensor | None = spec.bias
        empty = (spec.bias == lowest).all(-1, keepdim=True)
    else:
        visible, bias = materialize(spec, *shape, query.device, statistics_dtype(query.dtype))
        empty = None if visible is None else ~visible.any(-1, keepdim=True)
    if empty is not None and (_all_see(spec, shape) or (readable(empty) and not empty.any())):
        empty = None
    if bias is None:
        seen = visible if visible is None or empty is None else visible | empty
        return TorchArguments(seen, empty=empty)
    if visible is not None:
        bias = bias.masked_fill(~visible, lowest)
    if empty is not None:
        bias = bias.masked_fill(empty, 0.0)
    return TorchArguments(bias.to(query.dtype), empty=empty)


def _all_see(spec: MaskSpec, shape: Shape) -> bool:
    """True where it is known without a look at values that each row sees a key."""
    tables = (spec.bias, spec.dense, spec.key_mask, spec.bounds, spec.query_documents)
    if any(table is not None for table in tables):
        return False
    if spec.band_lo <= -UNLIMITED:
        return spec.band_hi >= 0
    if torch.compiler.is_compiling():
        return False
    return spec.band_hi >= 0 and shape[2] - 1 + spec.band_lo <= shape[3] - 1
