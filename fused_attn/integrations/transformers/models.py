"""Which models of transformers take the fused attention, and how they are switched to it.

Models whose attention does not go through the library's AttentionInterface decline the name with
a warning and run what they have (`unsupported` says why).
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, cast

from torch.nn import Module
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from fused_attn.integrations.transformers.attention import REFUSED, attention_forward
from fused_attn.integrations.transformers.encoders import NAME, fused_stack
from fused_attn.integrations.transformers.masks import attention_mask

# The interface as modeling files import it.
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@functools.cache
def register() -> None:
    """Make "fused_attn" known to transformers; calling it again changes nothing.

    An implementation can't decline a model by itself: the library lets a model with an attention
    of its own have any registered name, and such a model would add the bool masks that are meant
    for `attention_forward` to its scores. So the method that checks a requested name is wrapped:
    such models get a warning, and what they have, or what the library picks for a new one.
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
            current = self.config._attn_implementation
            requested_attention = None if current == NAME else current
        return check(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]


def unsupported(model: PreTrainedModel | type[PreTrainedModel]) -> str | None:
    """The reason why a model does not run on `attention_forward`; None if it does.

    Args:
        model: a model or its class. The models in it are asked for themselves.

    Returns:
        A reason, from what the library knows of its model classes, and from their code.
    """
    kind: Any = model if isinstance(model, type) else type(model)
    if not kind._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    return _obstacle(kind)


@functools.cache
def _obstacle(kind: type[PreTrainedModel]) -> str | None:
    library = sys.modules.get(kind.__module__)
    # The interface is imported by that name; models of convolutions alone have no use for it.
    attends = hasattr(library, _INTERFACE)
    if attends and not (kind._supports_sdpa or kind._supports_attention_backend):
        return "it supports neither sdpa nor other implementations: it does more with its masks"
    for part in _parts(kind):
        names = _names(part)
        for table in map(_globals(part).get, names):
            if _is_table(table) and NAME not in table:
                return f"{part.__name__} picks its attention by name from {', '.join(table)}"
        if _INTERFACE in names:
            if any(map(_finds_eager_alone, _methods(part))):
                return f"{part.__name__} finds no implementation but eager attention"
            keywords = _keywords(part)
            for argument, meaning in REFUSED.items():
                if argument in keywords:
                    return f"{part.__name__} hands over {argument}, which {meaning}"
    return None


def use_fused_attention(model: PreTrainedModel) -> tuple[Callable[[], None] | None, str]:
    """Switch a model, and the models in it, to "fused_attn"; stacks that can pack batches do.

    Returns:
        What undoes it, or None with the reason if the model cannot be switched; and the name of
        the implementation that was in use.
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
    `from_pretrained` reach them. Models in it that do not take "fused_attn" keep what they have.
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
    """Every config in the model, once."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            for entry in (config, *(getattr(config, key, None) for key in config.sub_configs)):
                if isinstance(entry, PreTrainedConfig):
                    configs[id(entry)] = entry
    return list(configs.values())


# ---- what the code of a model says --------------------------------------------------------------


def _attends(module: Any) -> bool:
    """True if a module, or one in it that is not of a model that declines, calls the interface."""
    kind: Any = type(module)
    if _INTERFACE in _names(kind):
        return True
    return any(
        _attends(child)
        for child in module.children()
        if not (isinstance(child, PreTrainedModel) and unsupported(child) is not None)
    )


def _parts(kind: Any) -> list[Any]:
    """A class, and the classes of its library file that it is made of, but for other models."""
    found, new = [kind], [kind]
    while new:
        part = new.pop()
        for name in sorted(_names(part)):
            value = _globals(part).get(name)
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


def _finds_eager_alone(code: types.CodeType) -> bool:
    """True if code takes the interface for an object with an attribute for each implementation.

    Those are entries, as of a dictionary, so that `getattr` gives its default.
    """
    names = code.co_names
    return _INTERFACE in names and "getattr" in names and "get_interface" not in names


@functools.cache
def _names(kind: type) -> frozenset[str]:
    """The global names, and attributes, in the methods of a class and of those that it extends."""
    return frozenset(name for code in _methods(kind) for name in code.co_names)


def _keywords(kind: type) -> frozenset[str]:
    """The names of arguments in the calls that the same methods make.

    Of the code, and not of the source, which classes that were made by exec do not have.
    """
    return frozenset(
        name
        for code in _methods(kind)
        for constant in code.co_consts
        if isinstance(constant, tuple)
        for name in constant
        if isinstance(name, str)
    )


def _methods(kind: type) -> Iterator[types.CodeType]:
    """The code of a class and of those that it extends, but for that of torch and the library."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is PreTrainedModel:
            continue
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, types.FunctionType):
                yield from _codes(function.__code__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(kind: type) -> dict[str, Any]:
    return dict(vars(sys.modules.get(kind.__module__, object)))


def _is_table(value: Any) -> TypeGuard[dict[str, type[Module]]]:
    """True for a dictionary of attention classes by the names of implementations."""
    return (
        isinstance(value, dict)
        and "eager" in value
        and all(isinstance(entry, type) and issubclass(entry, Module) for entry in value.values())
    )
