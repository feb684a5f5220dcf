"""Replacement of modules in an existing model by fused modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import Module

from fused_attn import nn
from fused_attn.backends import default_backend
from fused_attn.integrations.attention_in_code import attention_in
from fused_attn.integrations.transformers.encoders import PackedEncoder
from fused_attn.nn.norm import Norm
from fused_attn.nn.replacement import (
    REPLACEMENTS,
    FromTorch,
    patched,
    patched_class,
    qualified_name,
    wrapped,
)
from fused_attn.nn.transformer import TransformerEncoder


@dataclass(frozen=True)
class Swapped:
    """A swapped module: its name in the model, and its class before and after the swap."""

    name: str
    from_type: str
    to_type: str


@dataclass(frozen=True)
class Skipped:
    """A module that was not swapped: its name in the model, its class, and the reason."""

    name: str
    type: str
    reason: str


@dataclass
class SwapReport:
    """Report of `swap_modules`; its method `restore` undoes the swap.

    Attributes:
        swapped: the modules and Hugging Face models that are now fused. A module that is registered
            in several places is listed under each of its names.
        skipped: modules of a swappable kind that were not swapped, with the reason.
        unfused: modules with attention code that cannot be swapped, each with a suggestion. The
            code is inspected, not run, so an entry is only a hint: its attention may be unused.
        notes: messages about torch settings that were changed, modules that were already fused,
            stacks that return 0 in padded rows, and fallbacks of the default backend.
    """

    swapped: list[Swapped] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unfused: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Undo the swap by restoring the original classes and settings, in place.

        Later changes to parameters, hooks and flags are preserved. Copies of the model that were
        made with copy or pickle stay swapped.

        Raises:
            RuntimeError: the class of a module was changed after the swap. Undo that change and
                call `restore()` again.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError, because users must call the swapped model instead of its report."""
        raise TypeError(
            "a SwapReport is not a model: swap_modules changes the model in place and returns a "
            "report; call the model that was passed to it"
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
    """Replace the attention, Transformer and norm modules of a model by fused modules, in place.

    A swapped module remains the same object, and only its `__class__` changes. Parameters (with
    their dtypes, devices and requires_grad), optimizers, hooks, training flags, tied modules and
    references to modules stay valid. The model itself may be one of the swapped modules.

    Parametrizations and fully_shard also change the class of a module. Apply them after the swap,
    because modules that they have changed are skipped and reported. DistributedDataParallel may be
    applied before or after the swap. Swap before torch.compile to avoid compiling twice.

    After the swap, stacks of encoder layers (torch.nn.TransformerEncoder, and those of Hugging Face
    BERT and similar models) return 0 in padded rows instead of the original values. Pass
    remove_padding=False to prevent this.

    The inference fast path of torch.nn.TransformerEncoderLayer reads the weights of its child
    modules without calling them. If a layer is not swapped (a subclass, or attention=False) but one
    of its child modules is, the fast path of the layer is disabled.

    A swapped model can be copied, pickled and saved. To load it, fused_attn must be installed but
    need not be imported. `save_pretrained` of transformers writes a plain checkpoint, from which
    `from_pretrained` loads an unswapped model.

    Args:
        model: any torch.nn.Module. Modules of exactly these classes are swapped, at any depth:
            torch.nn.MultiheadAttention, the torch.nn.Transformer family, LayerNorm and RMSNorm; in
            Hugging Face transformers, the RMS norms, the non-attention parts of BERT's layers,
            attention modules with a rotary embedding of known code, and classes with the same code.
            Subclasses are skipped, because they may compute something else. Models of transformers
            are switched to attn_implementation "fused_attn".
        attention: swap attention modules and the Transformer containers. The inference fast path of
            torch's containers would bypass swapped attention modules.
        norm: swap the norms.
        remove_padding: let stacks of encoder layers pack padded batches, which skips computation on
            padding. Pass False for models that read padded rows, such as with
            `last_hidden_state.mean(1)`. No batch is packed then, and padded rows have the original
            values.

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
    fused = sum(isinstance(module, FromTorch) for module in model.modules())
    if fused:
        report.notes.append(f"modules that were already fused: {fused}")
    # Keyed by module id, because a module may be registered under several names.
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
        report.unfused += _unfused(model, report)
    _configure_padding(model, remove_padding, report)
    if report.swapped:
        report.notes += _fallback_warnings(model)
    return report


def _unfused(model: Module, report: SwapReport) -> Iterator[Skipped]:
    """Yield unreported modules that implement attention in their code, outermost first."""
    listed = {s.name for s in report.swapped} | {s.name for s in report.skipped}
    inside = tuple(f"{shown_name(name)}." if name else "" for name, _ in transformers_models(model))
    for name, module in model.named_modules():
        if isinstance(module, FromTorch) or shown_name(name) in listed:
            continue
        if inside and name.startswith(inside):  # switched by attn_implementation
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
    """Return True if `model` contains a fused module or a transformers model on "fused_attn"."""
    if any(isinstance(module, FromTorch) for module in model.modules()):
        return True
    return any(
        hf_model.config._attn_implementation == "fused_attn"
        for _, hf_model in transformers_models(model)
    )


def _register_integrations(model: Module) -> None:
    """Add the classes of timm and transformers to REPLACEMENTS, if these are imported."""
    timm: Any = sys.modules.get("timm.layers")
    if timm is not None:
        # Subclass of torch.nn.LayerNorm with equal results, and faster kernels under autocast.
        REPLACEMENTS[timm.LayerNorm] = nn.LayerNorm
    if "transformers" in sys.modules:
        from fused_attn.integrations.transformers import by_code

        by_code.register(model)


def _target(module: Module, attention: bool, norm: bool) -> type[Module] | None:
    """Return the fused class for the class of `module` or one of its bases; None to skip it."""
    if isinstance(module, FromTorch):
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
    return patched(module) or patched_class(type(module))


def _unknown_norm(module: Module, norm: bool) -> str | None:
    """Return the reason why a module named like a norm is skipped; None for other modules."""
    looks_like_one = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    if not norm or not looks_like_one or isinstance(module, FromTorch) or any(module.children()):
        return None
    return "custom norm: its computation is unknown"


def _disable_inference_path(module: Module, name: str, report: SwapReport) -> None:
    """Disable the inference fast path of a torch encoder layer that contains fused modules.

    The fast path passes the weights of these modules to torch._transformer_encoder_layer_fwd and
    does not call the modules. One of its conditions is a ReLU or GELU activation, which the layer
    records in `activation_relu_or_gelu`. Setting this attribute to 0 disables the fast path.
    """
    layer: Any = module
    if not isinstance(layer, torch.nn.TransformerEncoderLayer) or isinstance(layer, FromTorch):
        return
    activation = getattr(layer, "activation_relu_or_gelu", 0)
    if not activation or not any(isinstance(child, FromTorch) for child in layer.children()):
        return
    layer.activation_relu_or_gelu = 0
    report._undo.append(lambda: setattr(layer, "activation_relu_or_gelu", activation))
    report.notes.append(
        f"{name}: torch's inference fast path, which bypasses the fused modules, is disabled"
    )


def _swap(module: Module, target: type[Module], name: str, report: SwapReport) -> Swapped:
    source = type(module)
    # The fused classes add methods but no state, so reassigning __class__ is enough.
    module.__class__ = target

    def undo() -> None:
        if type(module) is not target:
            raise RuntimeError(
                f"cannot restore {name}: expected class {qualified_name(target)}, got "
                f"{qualified_name(type(module))}; first undo whatever changed its class (for "
                "example, remove parametrizations)"
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

    kind, padded = type(model).__name__, integration.padded_stacks(model)
    already_fused = f"{name}: its attention was already fused"
    if model.config._attn_implementation == integration.NAME and not padded:
        report.notes.append(already_fused)
        return
    restore, detail = integration.use_fused_attention(model)
    if restore is None:
        report.skipped.append(Skipped(name, kind, detail))
        return
    still_padded = integration.padded_stacks(model)
    if detail == integration.NAME and padded == still_padded:
        report.notes.append(already_fused)
        return
    report.swapped.append(
        Swapped(name, f"{kind}, {detail} attention", f"{integration.NAME} attention")
    )
    report._undo.append(restore)
    for part in still_padded:
        path = ".".join(filter(None, (name, part)))
        report.notes.append(
            f"{shown_name(path)}: keeps its padding, because packing changed the results of a "
            "small batch, or because one of its modules has hooks"
        )


def padding_removers(model: Module) -> list[tuple[str, Module, str]]:
    """Return the stacks that remove padding, as (name, module, name of the controlling flag)."""
    found: list[tuple[str, Module, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, TransformerEncoder) and module.enable_nested_tensor:
            found.append((shown_name(name), module, "enable_nested_tensor"))
        elif isinstance(module, PackedEncoder) and module.zeroes_padding:
            found.append((shown_name(name), module, "zeroes_padding"))
    return found


def _configure_padding(model: Module, remove_padding: bool, report: SwapReport) -> None:
    """Disable padding removal, or add a note that lists the stacks that remove padding."""
    stacks = padding_removers(model)
    if remove_padding:
        if stacks:
            names = ", ".join(name for name, _, _ in stacks)
            report.notes.append(
                f"padded rows are 0 in the output of {names}: swap_modules(model, "
                "remove_padding=False) keeps the original values there"
            )
        return
    for _, module, attribute in stacks:
        if attribute in module.__dict__:
            undo = functools.partial(setattr, module, attribute, True)
        else:  # the flag is a class attribute of the fused class
            undo = functools.partial(module.__dict__.pop, attribute, None)
        setattr(module, attribute, False)
        report._undo.append(undo)


def shown_name(name: str) -> str:
    """Return the name of a module for reports; `name` is empty for the model itself."""
    return name or "(the model)"
