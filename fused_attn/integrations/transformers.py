"""fused_attn as an attention implementation of Hugging Face transformers.

`register()` makes ``model.set_attn_implementation("fused_attn")`` work. The library asks for the
mask once a forward pass (`attention_mask`) and calls the attention in every layer
(`attention_forward`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from fused_attn import functional, masks
from fused_attn.masks import Mask

NAME = "fused_attn"

# Arguments that models hand to every attention implementation and that do not change what is
# computed here. A sliding window is part of the mask, which `attention_mask` made.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "training",
        "use_cache",
    }
)


def register() -> None:
    """Make "fused_attn" known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    # Without this one, transformers drops every mask without a word.
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        module: the calling layer; its is_causal attribute counts where the argument is None.
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attention_mask: what `attention_mask` made, a 4-D tensor (bool: True = attend; float:
            added), or a (batch, seqlen_k) tensor that is 1 for real keys.
        dropout: probability of dropping a weight.
        scaling: multiplies the scores; None is 1 / sqrt(head_dim).
        is_causal: attend causally where attention_mask does not say it: if it is None or 2-D.
        softcap: see `fused_attn.scaled_dot_product_attention`.
        position_bias: float, added to the scores besides attention_mask, as in T5.
        sliding_window: part of the mask; checked only.
        output_attentions: must be false: the weights are never held.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), contiguous, and None for the weights.

    Raises:
        NotImplementedError: an argument that would change the result is not supported.
        ValueError, TypeError: an argument is wrong.
    """
    if output_attentions:
        raise ValueError(
            "output_attentions must be False with fused_attn, which never holds the weights; use "
            'model.set_attn_implementation("eager") to look at them'
        )
    _refuse(kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    mask = attention_mask
    if isinstance(mask, Tensor) and mask.dim() == 2:
        mask = mask.to(torch.bool)[:, None, None, :]
    elif mask is not None:
        is_causal = False  # it is in the mask
        if isinstance(mask, Tensor) and mask.dim() != 4:
            raise ValueError(
                "attention_mask must have shape (batch, seqlen_k) or (batch, num_heads or 1, "
                f"seqlen_q or 1, seqlen_k), got {tuple(mask.shape)}"
            )
    elif sliding_window is not None and seqlen_k > sliding_window:
        raise NotImplementedError(
            f"attention_mask must not be None with sliding_window {sliding_window} and "
            f"{seqlen_k} keys: fused_attn expects the window in the mask"
        )
    if position_bias is not None:
        bias = masks.bias(position_bias)
        mask = bias if mask is None else cast(Mask, masks.as_mask(mask)) & bias
    # A single query is the last one of its sequence, not the first one: it sees all keys.
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        bool(is_causal and seqlen_q > 1),
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap,
    )
    return cast(Tensor, out).transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | Mask | None:
    """A mask function of transformers' AttentionMaskInterface.

    Args:
        batch_size, q_length, kv_length: the shape.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: what is visible, as a function of indices.
        attention_mask: (batch, tokens) bool, True for real tokens, or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: the model does not need the causal or
            the bidirectional mask as a tensor.

    Returns:
        None where everything is visible, a (batch, 1, 1, kv_length) bool tensor for padding alone,
        a Mask for causal attention, and transformers' own (batch, 1, q_length, kv_length) bool
        tensor for whatever else.
    """
    padding_understood = attention_mask is None or attention_mask.dim() == 2
    plain_offsets = isinstance(q_offset, int) and isinstance(kv_offset, int)
    understood = None
    if padding_understood and plain_offsets:
        if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
            return _key_mask(attention_mask, kv_length, kv_offset)
        if mask_function is causal_mask_function and allow_is_causal_skip:
            understood = _causal(q_length, q_offset - kv_offset)
    if understood is None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **kwargs,
        )
    key_mask = _key_mask(attention_mask, kv_length, kv_offset)
    return understood if key_mask is None else understood & masks.dense(key_mask)


def use_fused_attention(model: PreTrainedModel) -> tuple[Callable[[], None] | None, str]:
    """Switch a model, and the models in it, to "fused_attn".

    Returns:
        What undoes it, or None with the reason if the model cannot be switched; and the name of
        the implementation that was in use.
    """
    if not model._can_set_attn_implementation():
        return None, "its attention does not go through transformers' AttentionInterface"
    if not getattr(model, "_supports_sdpa", False):
        return None, "it does not support sdpa, so its attention is more than a mask and a softmax"
    before = [(config, config._attn_implementation) for config in _configs(model)]
    previous = str(model.config._attn_implementation)
    register()
    set_implementation(model, NAME)

    def restore() -> None:
        for config, implementation in before:
            config._attn_implementation_internal = implementation

    return restore, previous


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """`set_attn_implementation`, also in copies of the config, as the stacks of T5 have them."""
    model.set_attn_implementation(name)
    for config in _configs(model):
        if type(config) is type(model.config):
            config._attn_implementation_internal = name


def _causal(q_length: int, offset: int) -> Mask | None:
    """Query i at position i + offset sees keys up to there; None if no Mask says that."""
    if offset < 0:
        return None
    return masks.causal() if offset == 0 else masks.sliding_window(-1, offset)


def _key_mask(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    if padding is None:
        return None
    keys = cast(Tensor, prepare_padding_mask(padding, kv_length, kv_offset))
    return keys[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)


def _refuse(kwargs: dict[str, Any]) -> None:
    unsupported = [k for k, v in kwargs.items() if v is not None and k not in _HARMLESS]
    if unsupported:
        raise NotImplementedError(
            f"fused_attn does not support {', '.join(sorted(unsupported))} in an attention of "
            'transformers; use model.set_attn_implementation("sdpa") for this model'
        )


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config in the model, once."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for entry in (config, *(getattr(config, key, None) for key in config.sub_configs)):
                if isinstance(entry, PreTrainedConfig):
                    configs[id(entry)] = entry
    return list(configs.values())
