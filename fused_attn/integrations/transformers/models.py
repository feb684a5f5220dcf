"""Support checks for transformers models, and the switch of supported models to fused attention.

A model whose attention bypasses transformers' AttentionInterface retains its implementation, with a
warning. `unsupported` returns the reason.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeGuard, cast

from torch.nn import Module
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from fused_attn.base.behind_import import behind_import
from fused_attn.integrations.bytecode import keywords_in, methods_of, names_in
from fused_attn.integrations.transformers import NAME
from fused_attn.integrations.transformers.attention import REFUSED, attention_forward
from fused_attn.integrations.transformers.encoders import PackedEncoder, packing_class
from fused_attn.integrations.transformers.mask_functions import attention_mask

# Name under which modeling files import the AttentionInterface.
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_GENERATE_BATCH = "transformers.generation.continuous_batching.continuous_api"


@functools.cache
def register() -> None:
    """Register the attention implementation "fused_attn" with transformers; runs only once.

    An attention implementation cannot reject a model. transformers accepts any registered name
    even for a model with custom attention, which would then add our bool masks to its scores. This
    function therefore wraps the method that checks a requested name. For an unsupported model, the
    wrapper warns and retains the current implementation. New models get the library's default.
    """
    AttentionInterface.register(NAME, attention_forward)
    # Without a registered mask function, transformers silently drops every mask.
    AttentionMaskInterface.register(NAME, attention_mask)
    check = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        reason = unsupported(self) if requested_attention == NAME else None
        if reason is not None:
            kind = type(self).__name__
            warnings.warn(f"{kind} computes its attention without {NAME}: {reason}", stacklevel=2)
            current = self.config._attn_implementation
            requested_attention = None if current == NAME else current
        return check(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]
    behind_import(_GENERATE_BATCH, _allow_generate_batch)


def _allow_generate_batch(library: Any) -> None:
    """Let continuous batching, `generate_batch`, run models whose attention is "fused_attn".

    The library's manager switches all other implementations to flash-attn, or rejects them.
    Releases before 5.24, whose manager differs, reject "fused_attn".
    """
    manager = library.ContinuousBatchingManager
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    if switch is None:
        return

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(
        self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any
    ) -> None:
        if model.config._attn_implementation != NAME:
            switch(self, model, *args, **kwargs)
        elif not model._supports_flash_attn:
            raise NotImplementedError(
                f"fused_attn does not support {type(model).__name__} in continuous batching: "
                "transformers passes sequence lengths instead of masks, and only models that "
                "support flash attention accept them; call generate instead of generate_batch"
            )

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn


def unsupported(model: PreTrainedModel | type[PreTrainedModel]) -> str | None:
    """Return the reason why a model or its class cannot use `attention_forward`; None if it can.

    The reason is derived from attributes and code of the class. Nested models are not checked; call
    this for each of them.
    """
    kind: Any = model if isinstance(model, type) else type(model)
    if not kind._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    return _obstacle(kind)


@functools.cache
def _obstacle(kind: type[PreTrainedModel]) -> str | None:
    library = sys.modules.get(kind.__module__)
    # Files of purely convolutional models do not import the interface.
    attends = hasattr(library, _INTERFACE)
    if attends and not (kind._supports_sdpa or kind._supports_attention_backend):
        return "transformers supports only eager attention for it"
    for part in _parts(kind):
        names = names_in(part)
        for table in map(_globals(part).get, names):
            if _is_table(table) and NAME not in table:
                return f"{part.__name__} selects its attention class among {', '.join(table)}"
        if _INTERFACE in names:
            if any(map(_resolves_to_eager, methods_of(part))):
                return f"{part.__name__} always selects eager attention"
            keywords = keywords_in(part)
            for argument, meaning in REFUSED.items():
                if argument in keywords:
                    return f"{part.__name__} passes {argument}, which {meaning}"
    return None


def use_fused_attention(model: PreTrainedModel) -> tuple[Callable[[], None] | None, str]:
    """Switch a model and its nested models to "fused_attn", and enable packing of padded batches.

    Returns:
        A tuple of a function that undoes the switch and the name of the previous implementation.
        If the model cannot be switched, a tuple of None and the reason.
    """
    reason = unsupported(model)
    if reason is None and not _attends(model):
        reason = "nothing in it calls transformers' AttentionInterface"
    if reason is not None:
        return None, reason
    before = [(config, config._attn_implementation) for config in _configs(model)]
    previous = str(model.config._attn_implementation)
    register()
    set_implementation(model, NAME)
    stacks = [(stack, type(stack)) for stack in padded_stacks(model).values()]
    for stack, _ in stacks:
        _remove_padding(stack)

    def restore() -> None:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for stack, kind in stacks:
            stack.__class__ = kind

    return restore, previous


def padded_stacks(model: PreTrainedModel) -> dict[str, Module]:
    """Return the encoders in a model that may support padding removal but do not use it, by name.

    After `use_fused_attention`, these are the encoders whose packed and padded results differ.
    """
    return {name: m for name, m in model.named_modules() if packing_class(m) is not None}


def _remove_padding(encoder: Module) -> None:
    """Let an encoder remove padding if its results stay the same."""
    kind = type(encoder)
    # The subclass adds methods but no state, so the class can be reassigned in place.
    encoder.__class__ = cast(type[Module], packing_class(encoder))
    if not cast(PackedEncoder, encoder).is_exact():
        encoder.__class__ = kind


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Call `model.set_attn_implementation`, and update the config copies of its stacks as well.

    T5's stacks have such copies. Unlike `from_config` and `from_pretrained`, the library's method
    does not switch these stacks. Nested models that do not support "fused_attn" retain their
    implementation.
    """
    declining = [
        (part.config, part.config._attn_implementation)
        for part in model.modules()
        if name == NAME and isinstance(part, PreTrainedModel) and unsupported(part) is not None
    ]
    model.set_attn_implementation(name)
    for config in _configs(model):
        if type(config) is type(model.config):
            config._attn_implementation_internal = model.config._attn_implementation
    for config, implementation in declining:
        config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the distinct configs of all modules of a model, including sub-configs."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for entry in (config, *(getattr(config, key, None) for key in config.sub_configs)):
                if isinstance(entry, PreTrainedConfig):
                    configs[id(entry)] = entry
    return list(configs.values())


def _attends(module: Any) -> bool:
    """Return True if a module or a descendant calls the interface, ignoring unsupported models."""
    kind: Any = type(module)
    if _INTERFACE in names_in(kind):
        return True
    return any(
        _attends(child)
        for child in module.children()
        if not (isinstance(child, PreTrainedModel) and unsupported(child) is not None)
    )


def _parts(kind: Any) -> list[Any]:
    """Return a class and the Module classes of its file that it uses, directly or indirectly.

    Other PreTrainedModel classes are excluded.
    """
    found, new = [kind], [kind]
    while new:
        part = new.pop()
        names = _globals(part)
        for name in sorted(names_in(part) & names.keys()):
            value = names[name]
            if (
                isinstance(value, type)
                and issubclass(value, Module)
                and not issubclass(value, PreTrainedModel)
                and value.__module__ == kind.__module__
                and value not in found
            ):
                found.append(value)
                new.append(value)
    return found


def _resolves_to_eager(code: CodeType) -> bool:
    """Return True if code looks up implementations by `getattr` on the interface.

    Implementations are dictionary entries, so `getattr` always returns its default, eager.
    """
    names = code.co_names
    return _INTERFACE in names and "getattr" in names and "get_interface" not in names


def _globals(kind: type) -> dict[str, Any]:
    return dict(vars(sys.modules.get(kind.__module__, object)))


def _is_table(value: Any) -> TypeGuard[dict[str, type[Module]]]:
    """Return True for a dictionary from implementation names to attention classes."""
    return (
        isinstance(value, dict)
        and "eager" in value
        and all(isinstance(entry, type) and issubclass(entry, Module) for entry in value.values())
    )
