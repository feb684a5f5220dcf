"""Padding removal for the encoders of Hugging Face transformers models.

The layers of most encoders process each token independently, except in attention. A padded batch
is therefore packed before the layers and unpacked after them. Two kinds of modules are recognized
by the signature of their forward:

- stacks of layers, such as BertEncoder, whose arguments are hidden states and a mask;
- models that pass positions to their layers, such as ModernBERT with rotary embeddings. They are
  packed before the embeddings.

Before one of them removes padding, `is_exact` compares a packed batch with the padded one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from fused_attn.base.torch_state import is_compiling
from fused_attn.integrations.transformers import NAME
from fused_attn.integrations.transformers.packed import PACKING
from fused_attn.nn.packing import (
    TOKENWISE_MODULES,
    Packing,
    is_unmodified,
    must_stay_padded,
    outside_graphs,
    overrides_methods,
    packing_of,
    saves_time,
)

# Arguments of decoders, which attend to a cache or to another model.
_OF_DECODERS = {"cache", "past_key_values", "encoder_hidden_states"}


class PackedEncoder(Module):
    """Base class of encoders that pack padded batches without changing results of real tokens.

    Attributes:
        source: the original class, which is the other base class.
        zeroes_padding: if True, padded rows of the result are 0, packed or not, so the result does
            not depend on the amount of padding. If False, packing is disabled, and padded rows have
            the original encoder's values. `swap_modules(model, remove_padding=False)` sets it to
            False.
    """

    source: ClassVar[type[Module]]
    further_arguments: ClassVar[tuple[str, ...]]  # argument names of forward after the first two
    zeroes_padding = True

    def is_exact(self) -> bool:
        """Return True if a small packed batch and its padded original have the same results.

        Return False after an error, and if a module cannot be packed.
        """
        if not all(_is_tokenwise(module, self) for module in self.modules()):
            return False  # before running, because hooks would receive the sample
        try:
            with torch.no_grad(), _evaluating(self):
                # No padding, padding at the end, and at the beginning.
                rows = [[True] * 9, [True] * 5 + [False] * 4, [False] * 2 + [True] * 7]
                real = torch.tensor(rows, device=_weight(self).device)
                packing = cast(Packing, packing_of(~real, None, False, batch_first=True))
                inputs = self._sample(real)
                padded = self.source.forward(self, **inputs)
                return _agree(padded, self._packed(packing, **inputs), real)
        except Exception:
            return False

    def _sample(self, real: Tensor) -> dict[str, Any]:
        """Return random arguments of forward for a padded batch."""
        raise NotImplementedError

    def _packed(self, packing: Packing, **inputs: Any) -> Any:
        """Return the output of forward, computed on the packed batch."""
        raise NotImplementedError

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Move positional arguments to kwargs and return (); return them if they are invalid."""
        names = self.further_arguments[: len(args)]
        if len(names) < len(args) or any(name in kwargs for name in names):
            return args  # the original forward raises TypeError
        kwargs.update(zip(names, args, strict=True))
        return ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and copy look up classes by name and would not find a class created at run time.
        _, _, *state = cast(tuple[Any, ...], Module.__reduce_ex__(self, max(protocol, 2)))
        return _unpickled, (self.source,), *state


class PackedStack(PackedEncoder):
    """Base class of stacks of layers that pack padded batches."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the stack, on the packed batch if attention_mask has enough padding.

        Args:
            hidden_states: (batch, seqlen, hidden_size).
            attention_mask: mask of the original stack. The batch can be packed only if this is a
                padding mask, (batch, 1, 1, seqlen): bool, True for real tokens, or a float type, 0
                for real tokens and at most -1e4 for others.
            args, kwargs: other arguments of the original stack.

        Returns:
            The output of the original stack. With a padding mask, padded rows are 0 if
            `zeroes_padding` is True.
        """
        run: Callable[..., Any] = super().forward
        args = self._named(args, kwargs)
        if args or not all(map(_is_plain, kwargs.values())):
            return run(hidden_states, attention_mask, *args, **kwargs)
        if not self.zeroes_padding or not _is_padding(hidden_states, attention_mask):
            return run(hidden_states, attention_mask, **kwargs)
        bias, packing = None, None
        if attention_mask.dtype == torch.bool:
            real = attention_mask[:, 0, 0]
        else:
            bias = attention_mask[:, 0, 0]
            real = bias > -1e4  # the weights of other keys are 0
        if not _observed(self, kwargs):
            packing = outside_graphs(_choose_packing, hidden_states, real, self, bias)
        if packing is None:
            return _zeroed(run(hidden_states, attention_mask, **kwargs), real)
        return self._packed(packing, hidden_states, attention_mask, **kwargs)

    def _packed(  # type: ignore[override]
        self, packing: Packing, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any
    ) -> Any:
        run: Callable[..., Any] = super().forward
        output = run(packing.pack(hidden_states), packing, **kwargs)
        shape = hidden_states.shape
        output.last_hidden_state = packing.unpack(output.last_hidden_state, shape)
        return output

    def _sample(self, real: Tensor) -> dict[str, Any]:
        generator, weight = torch.Generator().manual_seed(0), _weight(self)
        hidden = torch.randn(*real.shape, weight.shape[-1], generator=generator).to(weight)
        return {"hidden_states": hidden, "attention_mask": real[:, None, None]}


class PackedModel(PackedEncoder):
    """Base class of models that pack padded batches before the embeddings.

    The Packing is an additional keyword argument, which the model passes to its attention layers.
    """

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the model, on the packed batch if attention_mask has enough padding.

        Args:
            input_ids: (batch, seqlen) integers, or None with inputs_embeds.
            attention_mask: mask of the original model. The batch can be packed only if this is
                (batch, seqlen), nonzero for real tokens, which must be contiguous.
            args, kwargs: other arguments of the original model.

        Returns:
            The output of the original model. With such a mask, padded rows of the last hidden state
            are 0 if `zeroes_padding` is True.
        """
        run: Callable[..., Any] = super().forward
        args = self._named(args, kwargs)
        tokens = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if args or not self.zeroes_padding or not _is_token_mask(tokens, attention_mask):
            return run(input_ids, attention_mask, *args, **kwargs)
        real, packing = attention_mask.to(torch.bool), None
        known = all(_is_plain(x) or _is_of_tokens(x, real.shape) for x in kwargs.values())
        if known and not _observed(self, kwargs):
            packing = outside_graphs(_choose_packing, _weight(self), real, self)
        if packing is None:
            return _zeroed(run(input_ids, attention_mask, **kwargs), real)
        return self._packed(packing, input_ids, attention_mask, **kwargs)

    def _packed(  # type: ignore[override]
        self, packing: Packing, input_ids: Tensor | None, attention_mask: Tensor, **kwargs: Any
    ) -> Any:
        shape = attention_mask.shape
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.arange(shape[1], device=attention_mask.device)[None]
        packed = {
            name: packing.pack(value.expand(*shape, *value.shape[2:]))
            if isinstance(value, Tensor)
            else value
            for name, value in {"input_ids": input_ids, **kwargs}.items()
        }
        run: Callable[..., Any] = super().forward
        output = run(**packed, **{PACKING: packing})
        states = output.last_hidden_state
        output.last_hidden_state = packing.unpack(states, torch.Size((*shape, states.shape[-1])))
        if output.get("pooler_output") is not None:
            output.pooler_output = cast(Any, self).pooler(output.last_hidden_state)
        return output

    def _sample(self, real: Tensor) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(len(_weight(self)), real.shape, generator=generator)
        return {"input_ids": tokens.to(real.device), "attention_mask": real.long()}


def packing_class(module: Module) -> type[PackedEncoder] | None:
    """Return the packing subclass of an encoder's class; None if the class is not supported."""
    base = _base(cast(Any, type(module)))
    if base is None or not any(isinstance(child, ModuleList) for child in module.children()):
        return None
    return _fused(cast(Any, type(module)))


@functools.cache
def _base(kind: type[Module]) -> type[PackedEncoder] | None:
    """Return the packing base class for the arguments of a class's forward; None if unsupported."""
    if issubclass(kind, PackedEncoder):
        return None
    if kind.__module__.partition(".")[0] not in ("transformers", "transformers_modules"):
        return None
    arguments = inspect.signature(kind.forward).parameters
    names, first = set(arguments), tuple(arguments)[1:3]
    if first == ("hidden_states", "attention_mask"):
        # A position_bias refers to the positions of the padded batch.
        return None if "position_bias" in names else PackedStack
    passes_on = any(a.kind is inspect.Parameter.VAR_KEYWORD for a in arguments.values())
    if first != ("input_ids", "attention_mask") or not passes_on or names & _OF_DECODERS:
        return None
    return PackedModel if {"position_ids", "inputs_embeds"} <= names else None


@functools.cache
def _fused(source: type[Module]) -> type[PackedEncoder]:
    base = cast(type[PackedEncoder], _base(cast(Any, source)))
    # transformers looks up a model's outputs by str(class), and saves the class name in the config.
    members: dict[str, Any] = {n: getattr(source, n) for n in ("__module__", "__qualname__")}
    # Trainer and torch.export inspect the argument names of forward.
    own: Any = base.forward
    parts = own.__code__, own.__globals__, "forward", own.__defaults__, own.__closure__
    forward: Any = FunctionType(*parts)
    forward.__signature__ = inspect.signature(source.forward)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
    names = [n for n, p in forward.__signature__.parameters.items() if p.kind in kinds]
    members |= {"forward": forward, "further_arguments": tuple(names[3:])}
    members |= {"__doc__": base.__doc__, "source": source}
    return cast(type[PackedEncoder], type(source.__name__, (base, source), members))


def _unpickled(source: type[Module]) -> Module:
    """Return an uninitialized instance of the packing subclass of `source`, for unpickling."""
    fused = _fused(cast(Any, source))
    return fused.__new__(fused)


def _weight(encoder: Any) -> Tensor:
    """Return a tensor (*, width): the embeddings of a model, or the first matrix of a stack."""
    if isinstance(encoder, PackedModel):
        return cast(Tensor, cast(Any, encoder).get_input_embeddings().weight)
    # torch.utils.mkldnn.to_mkldnn converts the matrices from parameters to buffers.
    tensors = (*encoder.parameters(), *encoder.buffers())
    return next(x for x in tensors if x.dim() == 2 and x.is_floating_point())


@contextmanager
def _evaluating(module: Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _agree(padded: Any, packed: Any, real: Tensor) -> bool:
    """Return True if two outputs have the same entries, with equal rows for real tokens.

    Rounding may differ, because the matmuls have different sizes. Other entries, such as pooled
    outputs, are compared only for the first sequence, which has no padding.
    """
    if list(padded) != list(packed):
        return False
    for name, expected in padded.items():
        given = packed[name]
        if not isinstance(expected, Tensor) or given.shape != expected.shape:
            return False
        rows = real if name == "last_hidden_state" else slice(1)
        given, expected = given[rows], expected[rows]
        tolerance = min(torch.finfo(expected.dtype).eps ** 0.5, 0.03)
        if not (given - expected).abs().max() <= tolerance * expected.abs().max():
            return False
    return True


def _is_plain(value: Any) -> bool:
    """Return True for None, numbers and strings; other arguments may contain tensors."""
    return value is None or isinstance(value, (bool, int, float, str))


def _observed(encoder: Any, arguments: dict[str, Any]) -> bool:
    """Return True if the call requests outputs of layers, such as hidden states, or a tuple."""

    def wanted(name: str, default: bool) -> Any:
        given = arguments.get(name)
        return getattr(config, name, default) if given is None else given

    config = getattr(encoder, "config", None)
    names = {"output_hidden_states", "output_attentions", "output_router_logits", *arguments}
    outputs = any(wanted(name, False) for name in names if name.startswith("output_"))
    return outputs or not wanted("return_dict", True)


def _collects_outputs(hook: Any) -> bool:
    """Return True if a hook collects outputs of layers for transformers.

    transformers adds these hooks in the first call that requests outputs, and never removes them.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _is_collecting() -> bool:
    """Return True while transformers collects layer outputs of this model or an enclosing one."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return collector is not None and bool(collector.get())


def _is_padding(hidden_states: Tensor, mask: Any) -> bool:
    """Return True if `mask` is a (batch, 1, 1, seqlen) tensor, which applies to all queries."""
    if not isinstance(mask, Tensor) or hidden_states.dim() != 3:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    return mask.shape == (hidden_states.shape[0], 1, 1, hidden_states.shape[1])


def _is_token_mask(tokens: Any, mask: Any) -> bool:
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return tokens.dim() in (2, 3) and mask.shape == tokens.shape[:2]


def _is_of_tokens(value: Any, shape: torch.Size) -> bool:
    """Return True for a tensor with one row per token, (batch or 1, seqlen, *)."""
    return isinstance(value, Tensor) and value.shape[:2] in (shape, (1, shape[1]))


def _choose_packing(
    x: Tensor, real: Tensor, encoder: PackedEncoder, bias: Tensor | None = None
) -> Packing | None:
    """Return the packing of a batch; None if it saves no time or a module is not token-wise.

    `x` is any tensor of the encoder's width. `real`, (batch, seqlen) bool, is True for real tokens.
    `bias`, of the same shape, is added to the scores.
    """
    if must_stay_padded(x, real) or not saves_time(x, ~real, encoder.training):
        return None
    if not is_compiling() and _is_collecting():
        return None
    if bias is not None and (is_compiling() or not torch.equal(bias == 0, real)):
        return None
    if not all(_is_tokenwise(module, encoder) for module in encoder.modules()):
        return None
    if (
        isinstance(encoder, PackedModel)
        and (
            is_compiling()  # the next condition reads values
            # Removing padding between tokens changes their distances, which windows depend on.
            or int((real[:, 1:] != real[:, :-1]).sum(1).max()) > 1
        )
    ):
        return None
    return packing_of(~real, None, False, batch_first=True)


def _is_tokenwise(module: Module, encoder: PackedEncoder) -> bool:
    attributes = module.__dict__  # a failed getattr on a module takes 3 us
    config = attributes.get("config")
    if config is not None and config._attn_implementation != NAME:
        return False  # other attention implementations do not accept a Packing
    if attributes.get("chunk_size_feed_forward"):
        return False
    kinds: Any = attributes.get("rope_type", "")  # a str, or a dict with one for each kind of layer
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if "dynamic" in str(kind) or kind == "longrope":
            return False  # the largest position, padding included, sets the frequencies
    if module is encoder:
        return not overrides_methods(module)  # its hooks receive padded batches
    if type(module) is torch.nn.Embedding and _only_requires_grads(module):
        return True
    own: type[Module] = type(module)
    known = (encoder.source.__module__, "transformers.activations")
    return is_unmodified(module, _collects_outputs) and (
        own in (*TOKENWISE_MODULES, ModuleList)
        or getattr(own, "source", own).__module__ in known
        # Compared by name, because importing this class warns that torch.jit is deprecated.
        or (own.__module__, own.__name__) == ("torch.utils.mkldnn", "MkldnnLinear")
    )


def _only_requires_grads(embeddings: Module) -> bool:
    """Return True if embeddings have no hooks except that of `gradient_checkpointing_enable`."""
    return not (embeddings._forward_pre_hooks or "forward" in embeddings.__dict__) and all(
        "enable_input_require_grads" in getattr(hook, "__qualname__", "")
        for hook in embeddings._forward_hooks.values()
    )


def _zeroed(output: Any, real: Tensor) -> Any:
    """Set the padded rows of an output's last hidden state to 0."""
    padding = real[..., None].logical_not()
    if isinstance(output, tuple):
        return (output[0].masked_fill(padding, 0.0), *output[1:])
    output.last_hidden_state = output.last_hidden_state.masked_fill(padding, 0.0)
    return output
