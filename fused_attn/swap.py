"""Replacement of the modules of an existing model by fused ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import Module

from fused_attn.backends import default_backend
from fused_attn.integrations.attention_in_code import attention_in
from fused_attn.integrations.transformers.encoders import PackedStack
from fused_attn.nn._from_torch import REPLACEMENTS, FromTorch, patched, qualified_name, wrapped
from fused_attn.nn.norm import Norm
from fused_attn.nn.transformer import TransformerEncoder


@dataclass(frozen=True)
class Swapped:
    """A swapped module: its name in the model, and its class before and after."""

    name: str
    from_type: str
    to_type: str


@dataclass(frozen=True)
class Skipped:
    """A module that was not swapped, and the reason."""

    name: str
    type: str
    reason: str


@dataclass
class SwapReport:
    """A report of `swap_modules`.

    Attributes:
        swapped: the modules and Hugging Face models that are now fused. A module that is registered
            in several places is listed under each of its names.
        skipped: modules of a swappable kind that were not swapped, with the reason.
        unfused: modules that implement attention in their own code, which a swap cannot replace,
            with a suggestion.
        notes: settings that were changed to make torch call the fused modules, modules that were
            fused already, and stacks that return 0 in padded rows.
    """

    swapped: list[Swapped] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unfused: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Undo the swap: restore the original classes and settings of the same objects.

        Later changes of parameters, hooks and flags are preserved. Copies of the model, made by
        copy or pickle, stay swapped.

        Raises:
            RuntimeError: the class of a module was changed after the swap. Undo that change, then
                call this again.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError: call the swapped model, not its report."""
        raise TypeError(
            "a SwapReport is no model: swap_modules changes the model in place and returns what "
            "it did; call the model that it was given"
        )

    def __str__(self) -> str:
        rows = [(s.name, s.from_type, f"-> {s.to_type}") for s in self.swapped]
        rows += [(s.name, s.type, f"left alone: {s.reason}") for s in self.skipped]
        rows += [(s.name, s.type, s.reason) for s in self.unfused]
        if not rows:
            return "; ".join(["nothing to swap", *self.notes])
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{len(self.swapped)} swapped, {len(self.skipped)} left alone"]
        if self.unfused:
            lines[0] += f", {len(self.unfused)} with other attention"
        lines += [f"  {name:{widths[0]}}  {kind:{widths[1]}}  {what}" for name, kind, what in rows]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def swap_modules(
    model: Module, *, attention: bool = True, norm: bool = True, remove_padding: bool = True
) -> SwapReport:
    """Replace the attention, Transformer and norm modules of a model by the fused ones, in place.

    A swapped module stays the same object: only its `__class__` changes. Parameters (their dtypes,
    devices and requires_grad), optimizers, hooks, training flags, tied modules and references to
    modules stay valid. The model itself may be one of the swapped modules.

    Apply wrappers that also change the class of a module (parametrizations, fully_shard) after the
    swap: modules that they changed are skipped and reported. DistributedDataParallel may come
    before or after. Swap before torch.compile, to avoid compiling twice.

    Stacks of encoder layers (torch.nn.TransformerEncoder, and those of Hugging Face BERT and
    similar models) return 0 in padded rows after the swap, where the original returns other
    values, unless remove_padding is False.

    If a torch.nn.TransformerEncoderLayer is not swapped (a subclass, or attention=False) but a
    module in it is, its inference fast path is disabled. That path reads the weights of those
    modules without calling them.

    A swapped model can be copied, pickled and saved. To load it, fused_attn must be installed but
    need not be imported. `save_pretrained` of transformers writes a plain checkpoint:
    `from_pretrained` returns an unswapped model.

    Args:
        model: any torch.nn.Module. At any depth, modules of exactly these classes are swapped:
            torch.nn.MultiheadAttention, the torch.nn.Transformer family, LayerNorm and RMSNorm, and
            from Hugging Face transformers the RMS norms and the non-attention parts of BERT's
            layers, with their copies. Subclasses are skipped, as they may compute something else.
            Models of transformers get attn_implementation "fused_attn".
        attention: swap attention, and the Transformer containers, whose inference fast path in
            torch would bypass it.
        norm: swap the norms.
        remove_padding: let stacks of encoder layers pack a batch, to skip the computation on
            padding. Pass False for models that read padded rows, as `last_hidden_state.mean(1)`
            does: nothing is packed, and padded rows have the original's values.

    Returns:
        A report of the swapped and skipped modules, with reasons; `restore()` undoes the swap.

    Raises:
        TypeError: model is not a Module.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4)
        >>> report = fused_attn.swap_modules(model)
        >>> len(report.swapped), len(report.skipped)
        (4, 0)
        >>> report.restore()
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _register_integrations(model)
    report = SwapReport()
    fused = sum(isinstance(module, tuple(REPLACEMENTS.values())) for module in model.modules())
    if fused:
        report.notes.append(f"modules that were fused already: {fused}")
    # By module id, as a module may be registered under several names.
    seen: dict[int, Swapped | Skipped] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in seen:
            target = _target(module, attention, norm)
            reason = _obstacle(module, target) if target else _unknown_norm(module, norm)
            if reason is not None:
                seen[id(module)] = Skipped("", qualified_name(type(module)), reason)
            elif target is not None:
                seen[id(module)] = _swap(module, target, shown_name(name), report)
        entry = seen.get(id(module))
        if isinstance(entry, Swapped):
            report.swapped.append(replace(entry, name=shown_name(name)))
        elif entry is not None:
            report.skipped.append(replace(entry, name=shown_name(name)))
    for name, module in model.named_modules():
        _disable_inference_path(module, shown_name(name), report)
    if attention:
        for name, hf_model in transformers_models(model):
            _swap_transformers_model(hf_model, shown_name(name), report)
    if attention:
        report.unfused += _unfused(model, report)
    _configure_padding(model, remove_padding, report)
    if report.swapped:
        report.notes += _fallback_warnings(model)
    return report


def _unfused(model: Module, report: SwapReport) -> Iterator[Skipped]:
    """Yield unreported modules that implement attention in their own code, outermost first."""
    listed = {s.name for s in report.swapped} | {s.name for s in report.skipped}
    inside = tuple(f"{shown_name(name)}." if name else "" for name, _ in transformers_models(model))
    for name, module in model.named_modules():
        if isinstance(module, FromTorch) or shown_name(name) in listed:
            continue
        if inside and name.startswith(inside):  # by attn_implementation
            continue
        if reason := attention_in(module):
            yield Skipped(shown_name(name), qualified_name(type(module)), reason)


def _fallback_warnings(model: Module) -> list[str]:
    """Return the fallback warnings of the default backends for the model's devices."""
    found = []
    for device_type in dict.fromkeys(p.device.type for p in model.parameters()):
        backend = default_backend(torch.device(device_type))
        if backend is not None and (warning := backend.fallback_warning(device_type)):
            found.append(warning)
    return found


def contains_fused_modules(model: Module) -> bool:
    """Return True if `model` has a fused module, or a model with "fused_attn" attention."""
    if any(isinstance(module, tuple(REPLACEMENTS.values())) for module in model.modules()):
        return True
    return any(
        hf_model.config._attn_implementation == "fused_attn"
        for _, hf_model in transformers_models(model)
    )


def _register_integrations(model: Module) -> None:
    """Add the classes of imported libraries to REPLACEMENTS."""
    if "timm.layers" in sys.modules:
        from fused_attn.integrations import timm

        timm.register()
    if "transformers" in sys.modules:
        from fused_attn.integrations.transformers import by_code

        by_code.register(model)


def _target(module: Module, attention: bool, norm: bool) -> type[Module] | None:
    """Return the fused class for the class of `module` or its base; None if not to be swapped."""
    if isinstance(module, tuple(REPLACEMENTS.values())):
        return None
    for source, target in REPLACEMENTS.items():
        if isinstance(module, source):
            return target if (norm if issubclass(target, Norm) else attention) else None
    return None


def _obstacle(module: Module, target: type[Module]) -> str | None:
    """Return the reason why a module cannot become a `target`; None if it can."""
    if reason := wrapped(module):
        return reason
    if REPLACEMENTS.get(type(module)) is not target:
        base = next(c for c in type(module).__mro__ if REPLACEMENTS.get(c) is target)
        return f"subclass of {qualified_name(base)} that may compute something else"
    return patched(module)


def _unknown_norm(module: Module, norm: bool) -> str | None:
    """Return the reason why a module named like a norm is skipped; None for other modules."""
    looks_like_one = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    if not norm or not looks_like_one or isinstance(module, FromTorch) or any(module.children()):
        return None
    return "a norm of its own: what it computes is not known"


def _disable_inference_path(module: Module, name: str, report: SwapReport) -> None:
    """Disable the inference fast path of a torch encoder layer that contains fused modules.

    The fast path passes their weights to torch._transformer_encoder_layer_fwd without calling them.
    It supports only ReLU and GELU; of its conditions, this one is a setting that can be changed.
    """
    layer: Any = module
    if not isinstance(layer, torch.nn.TransformerEncoderLayer) or isinstance(layer, FromTorch):
        return
    activation = getattr(layer, "activation_relu_or_gelu", 0)
    if not activation or not any(isinstance(child, FromTorch) for child in layer.children()):
        return
    layer.activation_relu_or_gelu = 0
    report._undo.append(lambda: setattr(layer, "activation_relu_or_gelu", activation))
    report.notes.append(f"{name}: torch's inference path, which calls no module in it, is off")


def _swap(module: Module, target: type[Module], name: str, report: SwapReport) -> Swapped:
    source = type(module)
    # The fused classes add methods but no state, so reassigning __class__ is enough.
    module.__class__ = target

    def undo() -> None:
        if type(module) is not target:
            raise RuntimeError(
                f"{name} was a {qualified_name(target)} after the swap and is a "
                f"{qualified_name(type(module))} now (a parametrization?): undo that first"
            )
        module.__class__ = source

    report._undo.append(undo)
    return Swapped(name, qualified_name(source), qualified_name(target))


def transformers_models(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the Hugging Face models in `model`, outermost first, without importing transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel):
            yield name, module


def _swap_transformers_model(model: Any, name: str, report: SwapReport) -> None:
    from fused_attn.integrations import transformers as integration

    kind = type(model).__name__
    if model.config._attn_implementation == integration.NAME and not (
        integration.padded_stacks(model)
    ):
        report.notes.append(f"{name}: its attention was fused already")
        return
    restore, detail = integration.use_fused_attention(model)
    if restore is None:
        report.skipped.append(Skipped(name, kind, detail))
        return
    report.swapped.append(
        Swapped(name, f"{kind}, {detail} attention", f"{integration.NAME} attention")
    )
    report._undo.append(restore)


def padding_removers(model: Module) -> list[tuple[str, Module, str]]:
    """Return the stacks that remove padding: name, module, and the flag that controls it."""
    found: list[tuple[str, Module, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, TransformerEncoder) and module.enable_nested_tensor:
            found.append((shown_name(name), module, "enable_nested_tensor"))
        elif isinstance(module, PackedStack) and module.zeroes_padding:
            found.append((shown_name(name), module, "zeroes_padding"))
    return found


def _configure_padding(model: Module, remove_padding: bool, report: SwapReport) -> None:
    """Disable the removal of padding, or report the stacks that remove it."""
    stacks = padding_removers(model)
    if remove_padding:
        if stacks:
            names = ", ".join(name for name, _, _ in stacks)
            report.notes.append(
                f"padded rows are 0 in the output of {names}: swap_modules(model, "
                "remove_padding=False) keeps the original's numbers there"
            )
        return
    for _, module, attribute in stacks:
        if attribute in module.__dict__:
            undo = functools.partial(setattr, module, attribute, True)
        else:  # a default of the fused class
            undo = functools.partial(module.__dict__.pop, attribute, None)
        setattr(module, attribute, False)
        report._undo.append(undo)


def shown_name(name: str) -> str:
    """Return the name of a module for reports; `name` is empty for the model itself."""
    return name or "(the model)"
