"""The attention of each layer of a transformers model, and which models take it.

The library asks for the mask once a forward pass (`attention_mask`) and calls the attention in
every layer (`attention_forward`). Models whose attention does not go through the library's
AttentionInterface decline the name with a warning and run their own (`unsupported` says why).
"""

from __future__ import annotations

import functools
import sys
import warnings
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

from fused_attn import functional, masks
from fused_attn.integrations.transformers.encoders import NAME, fused_stack
from fused_attn.integrations.transformers.masks import attention_mask
from fused_attn.masks import Mask
from fused_attn.nn.packing import Packing

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


@functools.cache
def register() -> None:
    """Make "fused_attn" known to transformers; calling it again changes nothing.

    An implementation can't decline a model by itself: the library lets a model with an attention
    of its own have any registered name, and such a model would add the bool masks that are meant
    for `attention_forward` to its scores. So the method that checks a requested name is wrapped:
    such models get a warning, and "eager", which is what they run.
    """
    AttentionInterface.register(NAME, attention_forward)
    # Without this one, transformers drops every mask without a word.
    AttentionMaskInterface.register(NAME, attention_mask)
    check = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        reason = unsupported(self) if requested_attention == NAME else None
        if reason is not None:
            kind = type(self).__name__
            warnings.warn(f"{kind} runs its own attention, not {NAME}: {reason}", stacklevel=2)
            requested_attention = "eager"
        return check(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]


def unsupported(model: PreTrainedModel | type[PreTrainedModel]) -> str | None:
    """The reason why a model does not run on `attention_forward`; None if it does.

    Args:
        model: a model or its class. The models in it are asked for themselves.

    Returns:
        A reason, from what the library knows of its model classes.
    """
    kind = model if isinstance(model, type) else type(model)
    if not kind._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    # The interface is imported by that name; models of convolutions alone have no use for it.
    attends = hasattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS")
    if attends and not (kind._supports_sdpa or kind._supports_attention_backend):
        return "it supports neither sdpa nor other implementations: it does more with its masks"
    return None


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        module: the calling layer; its is_causal attribute counts where the argument is None.
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_heads_kv, seqlen_k, head_dim).
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attention_mask: what `attention_mask` made, a 4-D tensor (bool: True = attend; float:
            added), a (batch, seqlen_k) tensor that is 1 for real keys, or the Packing of a batch
            that encoders.py packed.
        dropout: probability of dropping a weight.
        scaling: multiplies the scores; None is 1 / sqrt(head_dim).
        is_causal: attend causally where attention_mask does not say it: if it is None or 2-D.
        softcap: see `fused_attn.scaled_dot_product_attention`.
        position_bias: float, added to the scores besides attention_mask, as in T5.
        sliding_window: part of the mask; checked only.
        s_aux: float (num_heads,), sinks: logits that take part in the softmax and carry no value,
            as in GPT-OSS.
        output_attentions: warns, as sdpa does: the weights are never held.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), contiguous, and None for the weights.

    Raises:
        NotImplementedError: an argument that would change the result is not supported.
        ValueError, TypeError: an argument is wrong.
    """
    if output_attentions:
        warnings.warn(
            "fused_attn never holds the weights, so output_attentions=True returns none; use "
            'model.set_attn_implementation("eager") to look at them',
            stacklevel=2,
        )
    _refuse(kwargs)
    if isinstance(attention_mask, Packing):
        return _attend_packed(query, key, value, attention_mask, dropout, scaling), None
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
    result = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        bool(is_causal and seqlen_q > 1),
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap,
        return_lse=s_aux is not None,
    )
    if s_aux is None:
        out = cast(Tensor, result)
    else:
        # One more term in the denominator: exp(lse) / (exp(lse) + exp(s_aux)) of each row is left.
        out, lse = result
        share = torch.sigmoid(lse - s_aux.to(lse.dtype).reshape(1, -1, 1))
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attention within each sequence of a packed batch: (1, num_heads, total, head_dim) to (1,
    total, num_heads, head_dim)."""
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    out = functional.varlen_attention(
        query, key, value, packing.cu_seqlens, packing.cu_seqlens, packing.max_seqlen,
        packing.max_seqlen, packing.mask, dropout, scale=scaling,
    )  # fmt: skip
    return cast(Tensor, out)[None]


def use_fused_attention(model: PreTrainedModel) -> tuple[Callable[[], None] | None, str]:
    """Switch a model, and the models in it, to "fused_attn"; stacks that can pack batches do.

    Returns:
        What undoes it, or None with the reason if the model cannot be switched; and the name of
        the implementation that was in use.
    """
    reason = unsupported(model)
    if reason is not None:
        return None, reason
    before = [(config, config._attn_implementation) for config in _configs(model)]
    previous = str(model.config._attn_implementation)
    register()
    set_implementation(model, NAME)
    stacks = [(stack, type(stack)) for stack in padded_stacks(model)]
    for stack, kind in stacks:
        # It adds methods and no state, so an object of the one class is one of the other.
        stack.__class__ = cast(type[Module], fused_stack(kind))

    def restore() -> None:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for stack, kind in stacks:
            stack.__class__ = kind

    return restore, previous


def padded_stacks(model: PreTrainedModel) -> list[Module]:
    """The stacks of encoder layers in a model that could drop padding and do not yet."""
    return [module for module in model.modules() if fused_stack(type(module)) is not None]


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """`set_attn_implementation`, also in copies of the config, as the stacks of T5 have them.

    The library's own method leaves such stacks on the attention that they had. `from_config` and
    `from_pretrained` reach them.
    """
    model.set_attn_implementation(name)
    for config in _configs(model):
        if type(config) is type(model.config):
            config._attn_implementation_internal = name


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
