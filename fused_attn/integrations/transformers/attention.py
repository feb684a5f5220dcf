"""Attention function that every layer of a transformers model calls.

transformers calls `attention_mask` (mask_functions.py) once for each kind of layer in a forward
pass, and `attention_forward` in every layer.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fused_attn import functional, masks
from fused_attn.integrations.transformers.model_mask import mask_of_tensor
from fused_attn.integrations.transformers.packed import (
    PACKING,
    batching_arguments,
    encoder_arguments,
)
from fused_attn.masks import Mask
from fused_attn.nn.attention import on_heads_of
from fused_attn.nn.mask_terms import combine
from fused_attn.nn.packing import Packing

# Unsupported arguments that would change the result, with descriptions for error messages. Other
# arguments that models pass to attention functions (layer_idx, position_ids, ...) do not change it.
REFUSED = {
    "block_indices": "selects the blocks of keys that a query attends to",
    "head_mask": "scales the weights of each head",
}


def attention_forward(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | Packing | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, for transformers' AttentionInterface.

    Packed sequences arrive in one of three ways. PackedStack passes a Packing as `attention_mask`.
    PackedModel passes a Packing as the keyword PACKING; `attention_mask` is then the mask of the
    packed batch. Continuous batching passes cumulative sequence lengths as keywords.

    Args:
        module: the calling layer. Its is_causal attribute is used if the argument is None.
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attention_mask: the result of `attention_mask`, a 4-D tensor (bool: True = attend; float:
            added to the scores), a (batch, seqlen_k) tensor that is 1 for real keys, or the Packing
            of a batch packed by encoders.py.
        dropout: dropout probability of the attention weights.
        scaling: scale of the scores; None means 1 / sqrt(head_dim).
        is_causal: use causal attention if attention_mask is None or 2-D.
        softcap: see `fused_attn.scaled_dot_product_attention`.
        position_bias: float tensor added to the scores in addition to attention_mask, as in T5.
        sliding_window: window size; only checked, because the mask contains the window, except with
            PACKING and in continuous batching. Ignored with is_causal=False and no mask, which mean
            that all keys are visible.
        s_aux: attention sinks, float (num_heads,), as in GPT-OSS: logits that are part of the
            softmax but have no value.
        output_attentions: if True, warn, as sdpa does, that the weights are never materialized.
        indices: (batch, seqlen_q, chosen) integers, as in DeepSeek-V3.2. A query attends only to
            the keys at its indices.
        kwargs: ignored, as in sdpa, except those of continuous batching, and those in `REFUSED`,
            which raise NotImplementedError.

    Returns:
        A tuple of the output, contiguous (batch, seqlen_q, num_heads, head_dim_v), and None in
        place of the weights.

    Raises:
        NotImplementedError: an argument that would change the result is not supported.
        ValueError, TypeError: an argument is invalid.
    """
    if output_attentions:
        warnings.warn(
            "fused_attn never materializes attention weights, so output_attentions=True returns "
            'None in their place; use model.set_attn_implementation("eager") to get them',
            stacklevel=2,
        )
    _refuse(kwargs)
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "softcap": softcap}
    options["sinks"] = None if s_aux is None else s_aux.flatten()
    if isinstance(attention_mask, Packing):
        options |= attention_mask.varlen_arguments()
        return _attend_packed(module, query, key, value, options), None
    refused = {
        "attention_mask": attention_mask, "position_bias": position_bias, "indices": indices,
        "is_causal=False": True if is_causal is False else None,
    }  # fmt: skip
    packed = batching_arguments(kwargs, sliding_window, refused)
    if packed is not None:
        return _attend_packed(module, query, key, value, options | packed), None
    all_visible = is_causal is False and attention_mask is None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask, seqlen_k = attention_mask, key.shape[2]
    if isinstance(mask, Tensor):
        mask = mask_of_tensor(mask, query, key)
    if PACKING in kwargs:
        unsupported = {
            "position_bias": position_bias is not None,
            "indices": indices is not None,
            "causal attention": bool(is_causal) and mask is None,
        }
        packed = encoder_arguments(kwargs[PACKING], mask, sliding_window, unsupported)
        return _attend_packed(module, query, key, value, options | packed), None
    _check_packing(mask, kwargs.get("cu_seq_lens_q"))
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        is_causal = False  # the mask already is causal if required
    terms = (
        _checked_mask(mask, None if all_visible else sliding_window, seqlen_k),
        None if indices is None else _chosen(indices, seqlen_k),
        None if position_bias is None else masks.bias(position_bias),
    )
    # A single query (decoding) is the last position of its sequence, so all keys are visible to it.
    attend = partial(
        functional.scaled_dot_product_attention,
        attn_mask=combine([term for term in terms if term is not None]),
        is_causal=bool(is_causal and query.shape[2] > 1),
        enable_gqa=query.shape[1] != key.shape[1],
        **options,
    )
    out: Tensor = on_heads_of(module, attend, query, key, value)
    return out.transpose(1, 2).contiguous(), None


def _attend_packed(
    module: Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """Call varlen_attention with the given options for the layer.

    Operands have shape (1, num_heads, total, head_dim); the result is (1, total, num_heads,
    head_dim).
    """
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    attend = partial(functional.varlen_attention, **options)
    return on_heads_of(module, attend, query, key, value)[None]


def _checked_mask(
    mask: Tensor | Mask | None, window: int | None, seqlen_k: int
) -> Tensor | Mask | None:
    """Check attention_mask, and convert it to an argument of scaled_dot_product_attention."""
    if mask is None:
        if window is not None and seqlen_k > window:
            raise NotImplementedError(
                f"attention_mask must not be None with sliding_window {window} and {seqlen_k} "
                "keys: fused_attn expects the window in the mask"
            )
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.to(torch.bool)[:, None, None, :]
    elif isinstance(mask, Tensor) and mask.dim() != 4:
        raise ValueError(
            "attention_mask must have shape (batch, seqlen_k) or (batch, num_heads or 1, "
            f"seqlen_q or 1, seqlen_k), got {tuple(mask.shape)}"
        )
    return mask


def _chosen(indices: Tensor, seqlen_k: int) -> Mask:
    """Return the Mask in which only the keys in `indices` are visible."""
    shape = (*indices.shape[:2], seqlen_k)
    visible = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    return masks.dense(visible.scatter(-1, indices.long(), True)[:, None])


def _refuse(kwargs: dict[str, Any]) -> None:
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"fused_attn does not support the argument {name}, which {REFUSED[name]}: use "
                'model.set_attn_implementation("sdpa") for this model'
            )


def _check_packing(mask: Tensor | Mask | None, cu_seqlens: Tensor | None) -> None:
    """Raise NotImplementedError if cu_seqlens packs sequences that the mask does not separate."""
    if cu_seqlens is None or cu_seqlens.shape[0] <= 2 or isinstance(mask, Tensor):
        return
    if mask is None or not mask.document_pairs:
        raise NotImplementedError(
            "fused_attn does not infer packed sequences from cu_seq_lens_q alone: pass "
            "position_ids that restart at 0 in each sequence, no attention_mask, and "
            "use_cache=False"
        )
