"""Base class of fused modules, which override `forward` of torch.nn and transformers classes.

REPLACEMENTS registers them. Constructors, initialization, state_dict keys and unpickling are
inherited from the replaced class.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module, ModuleList
from torch.nn.utils.parametrize import is_parametrized

from fused_attn.backends import default_backend
from fused_attn.base.namespace import NAMESPACE
from fused_attn.base.torch_state import is_compiling
from fused_attn.call.handlers import is_dtensor

ModuleT = TypeVar("ModuleT", bound="FromTorch")
ForwardT = TypeVar("ForwardT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)

# Maps each replaceable class to its fused replacement. `replaces` and the integrations fill it.
REPLACEMENTS: dict[type[Module], type[FromTorch]] = {}


def replaces(torch_class: type[Module]) -> Callable[[ClassT], ClassT]:
    """Register the decorated class as the replacement of `torch_class`."""

    def register(cls: ClassT) -> ClassT:
        REPLACEMENTS[torch_class] = cls
        # help() and inspect show this signature instead of (*args, **kwargs).
        cls.__signature__ = inspect.signature(torch_class)  # type: ignore[attr-defined]
        return cls

    return register


class FromTorch(Module):
    """Base class of the drop-in modules; subclasses must list it before the torch.nn class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _convert_children(self)

    def _get_name(self) -> str:
        """Return the class name for repr(), with a package prefix that marks fused modules."""
        own = type(self).__module__.startswith(f"{NAMESPACE}.nn.")
        package = f"{NAMESPACE}.nn" if own else NAMESPACE
        return f"{package}.{type(self).__name__}"

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError; torch.jit.script calls this before it compiles a module."""
        name = qualified_name(type(self))
        raise NotImplementedError(
            f"torch.jit.script cannot compile {name}, which calls its kernels from Python: use "
            "torch.compile or torch.export, or undo the swap with SwapReport.restore() before "
            "scripting"
        )

    @classmethod
    def from_torch(cls: type[ModuleT], module: Module) -> ModuleT:
        """Return a fused module that shares the parameters of `module`.

        Child modules that have a fused replacement are converted as well.

        Args:
            module: an instance of the class that this class replaces, not of a subclass.

        Returns:
            A new module that shares parameters and buffers with `module`. Its hooks and training
            flag are copied from `module`.

        Raises:
            TypeError: `module` has a different class. Subclasses are rejected, because they may
                override the computation.
            ValueError: `module.forward` was replaced on the instance, or `module` was compiled in
                place.

        Example:
            >>> torch_attention = torch.nn.MultiheadAttention(64, 4)
            >>> attention = fused_attn.nn.MultiheadAttention.from_torch(torch_attention)
            >>> attention.in_proj_weight is torch_attention.in_proj_weight
            True
        """
        if REPLACEMENTS.get(type(module)) is not cls:
            replaced = [qualified_name(old) for old, new in REPLACEMENTS.items() if new is cls]
            expected = replaced[0] if replaced else "module that this class replaces"
            raise TypeError(f"module must be a {expected}, got {qualified_name(type(module))}")
        if reason := patched(module):
            raise ValueError(f"module must not be patched: {reason}")
        new = cls.__new__(cls)
        for name, value in module.__dict__.items():
            # Modules must not share the dicts and sets that hold parameters, children and hooks.
            new.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
        _convert_children(new)
        return new


def fx_leaf(forward: ForwardT) -> ForwardT:
    """Wrap `forward` so that torch.fx traces the module as a leaf, as it does torch.nn modules."""

    @functools.wraps(forward)
    def traced(self: Module, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Proxy):
            tracer: Any = args[0].tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return cast(ForwardT, traced)


def convert(module: Module) -> Module:
    """Return the fused replacement of `module`, or `module` itself if it has none.

    A ModuleList with replaceable items is replaced by a ModuleList of the converted items.
    """
    replacement = REPLACEMENTS.get(type(module))
    if replacement is not None:
        return replacement.from_torch(module)
    if type(module) is ModuleList and any(type(child) in REPLACEMENTS for child in module):
        return ModuleList(convert(child) for child in module)
    return module


def torch_infers(module: Module, x: Tensor) -> bool:
    """Return True if torch's inference fast path may compute `module`.

    This requires evaluation mode, no DTensor parameters, and a default backend for the device of x
    that wraps torch's kernels. Under torch.compile, the result is always False.
    """
    if module.training or is_compiling():
        return False
    backend = default_backend(x.device)
    if backend is None or not backend.wraps_torch:
        return False
    return not any(is_dtensor(parameter) for parameter in module.parameters())


def wrapped(module: Module) -> str | None:
    """Return the reason why torch has replaced the class of `module`, or None if it has not."""
    if is_parametrized(module):
        return "it is parametrized; swap first, then register the parametrization"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "it is wrapped by fully_shard; swap first, then shard"
    return None


# Methods of torch.nn that compute results. Fused modules override `forward`.
_PASSES = ("forward", "_sa_block", "_mha_block", "_ff_block")


def patched(module: Module) -> str | None:
    """Return the reason why calling `module` bypasses a method of its class, or None."""
    for name in _PASSES:
        if name in module.__dict__:
            return f"its {name} was replaced on the instance"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "it was compiled in place; convert first, then call compile()"
    return None


def patched_class(cls: type) -> str | None:
    """Return the reason if a method of a torch.nn class was replaced, or None."""
    for name in _PASSES if cls.__module__.startswith("torch.nn.") else ():
        if name in vars(cls) and not is_original(cls, name):
            return f"{qualified_name(cls)}.{name} was replaced"
    return None


def is_original(cls: type, name: str) -> bool:
    """Return True if a method of a class comes from the same file as its constructor."""
    files = [
        getattr(getattr(method, "__code__", None), "co_filename", None)
        for method in (vars(cls)[name], inspect.unwrap(cast(Any, cls).__init__))
    ]
    return files[0] is not None and files[0] == files[1]


def qualified_name(cls: type) -> str:
    """Return the dotted name of a class, in its public form for torch.nn and fused_attn.nn."""
    if getattr(torch.nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    if cls.__module__.startswith(f"{NAMESPACE}.nn."):
        return f"fused_attn.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _convert_children(module: Module) -> None:
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = convert(child)


def is_plain(module: Module) -> bool:
    """Return True if calling `module` only runs `forward` of its class, without hooks."""
    no_global_hooks = not torch.nn.modules.module._has_any_global_hook()
    return no_global_hooks and "forward" not in module.__dict__ and unhooked(module)


def unhooked(module: Module, ignored: Callable[[Any], bool] | None = None) -> bool:
    """Return True if no hooks are registered on `module`; global hooks may be set.

    Args:
        ignored: returns True for forward hooks to disregard.
    """
    hooks: Any = module._forward_hooks
    if hooks and ignored is not None:
        hooks = [hook for hook in hooks.values() if not ignored(hook)]
    return not (
        hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
