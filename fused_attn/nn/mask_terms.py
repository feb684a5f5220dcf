"""Conversion of the masks of torch.nn (True = ignore) to those of fused_attn (True = visible)."""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.masks import Mask
from fused_attn.masks.recognize import is_causal_mask
from fused_attn.masks.tensors import known_mask


def mask_terms(
    attn_mask: Tensor | Mask | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> tuple[list[Tensor | Mask], bool]:
    """Convert the masks of torch.nn to masks of fused_attn.

    Returns:
        A tuple of the masks to combine and is_causal, which is True if a causal mask applies as
        well. Each mask is a Mask, or a bool (True = visible) or float tensor that broadcasts to
        (batch, num_heads, seqlen_q, seqlen_k).
    """
    terms: list[Tensor | Mask] = []
    if key_padding_mask is not None:
        _check_mask_type("key_padding_mask", key_padding_mask)
        expected = (batch, seqlen_k)
        shape = tuple(key_padding_mask.shape)
        if shape != expected and not (batch == 1 and shape == (seqlen_k,)):
            raise ValueError(f"key_padding_mask must have shape (N, S) = {expected}, got {shape}")
        terms.append(_visible(key_padding_mask).reshape(batch, 1, 1, seqlen_k))
    attn_mask = known_mask(attn_mask, (seqlen_q, seqlen_k))
    if isinstance(attn_mask, Mask):
        terms.append(attn_mask)
    elif attn_mask is not None:
        _check_mask_type("attn_mask", attn_mask)
        if attn_mask.shape not in (
            (seqlen_q, seqlen_k),
            (batch * num_heads, seqlen_q, seqlen_k),
        ):
            raise ValueError(
                f"attn_mask must have shape (L, S) = {(seqlen_q, seqlen_k)} or (N * num_heads, L, "
                f"S) = {(batch * num_heads, seqlen_q, seqlen_k)}, got {tuple(attn_mask.shape)}"
            )
        # A mask that requires grad must be added to the scores to get a gradient, so it is never
        # replaced by causal attention.
        is_causal = not attn_mask.requires_grad and is_causal_mask(attn_mask, is_causal or None)
        if not is_causal:
            term = _visible(attn_mask)
            terms.append(term if term.dim() == 2 else term.unflatten(0, (batch, num_heads)))
    return terms, is_causal


def combine(terms: list[Tensor | Mask]) -> Tensor | Mask | None:
    """Combine the masks from `mask_terms` into one; return None if the list is empty."""
    if len(terms) < 2:
        return terms[0] if terms else None
    return functools.reduce(operator.and_, map(masks.as_mask, terms))


def _visible(mask: Tensor) -> Tensor:
    """Invert a bool mask (True = ignore), and return a float mask unchanged."""
    return ~mask if mask.dtype == torch.bool else mask


def _check_mask_type(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = type(mask).__name__
        if isinstance(mask, Tensor):
            hint = "pass mask.bool() if 1 means ignore, or mask == 0 if 1 means attend"
            got = f"{mask.dtype}: {hint}"
        raise TypeError(f"{name} must be a bool or float tensor, got {got}")
