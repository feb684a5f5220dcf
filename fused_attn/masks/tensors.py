"""Masks from tensors and from torch's mask objects."""

from __future__ import annotations

import operator
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fused_attn.base.torch_state import PLAIN_TYPES
from fused_attn.masks.mask import Mask, causal, describe
from fused_attn.masks.mask_mod import from_block_mask
from fused_attn.masks.memo import recall

# Maps each BlockMask to (its attributes, its Mask), so that layers that share a BlockMask evaluate
# it once.
_OF_BLOCK_MASKS: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Mask]] = WeakKeyDictionary()

# Combining conditions launches no kernels, so the cached Mask does not depend on a CUDA stream.
_CPU = torch.device("cpu")


def dense(mask: Tensor) -> Mask:
    """Create a mask from a bool tensor.

    Args:
        mask: True = attend; broadcastable to (batch, num_heads, seqlen_q, seqlen_k). A tensor of
            size 1 in the query dimension, such as (batch, 1, 1, seqlen_k), becomes a key mask of
            O(seqlen_k) cost.
    """
    if (
        isinstance(known_mask(mask), Mask)
        or not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
    ):
        raise TypeError(
            f"mask must be a bool tensor (True = attend), got {describe(mask)}"
            f"{_as_bool(mask) or '; pass a float mask to masks.bias'}"
        )
    return Mask(dense_masks=(mask,))


def bias(mask: Tensor) -> Mask:
    """Create a mask from a float tensor that is added to the scores, after scale and softcap.

    Args:
        mask: broadcastable to (batch, num_heads, seqlen_q, seqlen_k); -inf masks a position. If it
            requires grad, the gradient has its shape.
    """
    if (
        isinstance(known_mask(mask), Mask)
        or not isinstance(mask, Tensor)
        or not mask.is_floating_point()
    ):
        raise TypeError(
            f"mask must be a float tensor, got {describe(mask)}; pass a bool mask to masks.dense"
        )
    return Mask(biases=(mask,))


def known_mask(attn_mask: Any, lengths: tuple[int, int] | None = None) -> Any:
    """Return the Mask that an object of torch represents; other values are returned unchanged.

    Args:
        attn_mask: torch's CausalBias, whose memory holds no mask, becomes `causal`. A BlockMask of
            FlexAttention becomes the result of `from_block_mask`.
        lengths: (seqlen_q, seqlen_k) of the call, if known.

    Raises:
        ValueError: a CausalBias has other lengths than the call.
        TypeError: another subclass overrides `__torch_function__`, so its memory may not hold its
            values.
    """
    if type(attn_mask) in PLAIN_TYPES or isinstance(attn_mask, Mask):
        return attn_mask
    if not isinstance(attn_mask, Tensor):
        flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
        if flex is None or not isinstance(attn_mask, flex.BlockMask):
            return attn_mask
        known, parts = _OF_BLOCK_MASKS.get(attn_mask), _parts_of(attn_mask)
        if known is None or not all(map(operator.is_, known[0], parts)):
            known = parts, from_block_mask(attn_mask)
            _OF_BLOCK_MASKS[attn_mask] = known
        return known[1]
    of_torch: Any = sys.modules.get("torch.nn.attention.bias")
    if of_torch is not None and isinstance(attn_mask, of_torch.CausalBias):
        given: Any = attn_mask
        own = given.seq_len_q, given.seq_len_kv
        if lengths is not None and own != lengths:
            raise ValueError(f"attn_mask must be a CausalBias for lengths {lengths}, got {own}")
        is_top_left = given.variant == of_torch.CausalVariant.UPPER_LEFT
        return causal("top_left" if is_top_left else "bottom_right")
    if _decides_its_values(type(attn_mask)):
        raise TypeError(
            f"attn_mask must be a plain tensor, got {type(attn_mask).__name__}, a Tensor subclass "
            "that overrides __torch_function__: if its values are stored in its memory, pass "
            "attn_mask.as_subclass(torch.Tensor)"
        )
    return attn_mask


def _parts_of(block_mask: Any) -> tuple[Any, ...]:
    """Return the attributes of a BlockMask that `from_block_mask` reads, which may be replaced."""
    lists = block_mask.kv_num_blocks, block_mask.kv_indices
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return (*lists, *full, block_mask.mask_mod, block_mask.seq_lengths, block_mask.BLOCK_SIZE)


def _decides_its_values(kind: type[Tensor]) -> bool:
    """Return True if a subclass of Tensor overrides `__torch_function__`."""
    function: Any = kind.__torch_function__
    if function is torch._C._disabled_torch_function_impl:
        return False
    inherited: Any = Tensor.__torch_function__
    return getattr(function, "__func__", function) is not inherited.__func__


def as_mask(attn_mask: Tensor | Mask | None, is_causal: bool = False) -> Mask | None:
    """Convert an `attn_mask` argument to a Mask, or to None if every position is visible.

    Args:
        attn_mask: a Mask, a bool tensor (True = attend), a float tensor (added to the scores),
            torch's CausalBias or BlockMask, or None.
        is_causal: combine attn_mask with `causal()`.
    """
    attn_mask = known_mask(attn_mask)
    if attn_mask is None:
        mask = None
    elif isinstance(attn_mask, Mask):
        mask = attn_mask
    elif not isinstance(attn_mask, Tensor):
        raise TypeError(
            f"attn_mask must be a bool tensor, a float tensor or a Mask, got {describe(attn_mask)}"
        )
    elif attn_mask.is_nested or attn_mask.layout != torch.strided:
        raise TypeError("attn_mask must be a dense tensor, got a nested or sparse tensor")
    elif attn_mask.dtype == torch.bool:
        mask = dense(attn_mask)
    elif attn_mask.is_floating_point():
        mask = bias(attn_mask)
    else:
        raise TypeError(
            f"attn_mask must be bool or float, got {attn_mask.dtype}{_as_bool(attn_mask)}"
        )
    if not is_causal:
        return mask
    if mask is None:
        return causal()
    return recall(mask.memo, "causal", mask.tensors(), _CPU, lambda: mask & causal())


def _as_bool(mask: object) -> str:
    """Return a hint for error messages to call .bool() on an integer mask; "" for other types."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        return ""
    return ": if 1 means attend and 0 means mask, pass its .bool()"
