"""Conversion of Hugging Face transformers mask functions to Masks.

The library describes a mask by a function of indices, an opaque composition of closures, which
each attention implementation interprets. `attention_mask` recognises the library's functions by
their code and reads their closure variables. A composition that contains anything else (a user's
function, a union) is evaluated position by position, as for sdpa: slow, but never wrong.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from fused_attn import masks
from fused_attn.base.torch_state import captured, plain_eager
from fused_attn.integrations.transformers.model_mask import ModelMask, added, stand_in
from fused_attn.masks import Mask

# All closures made by one of these functions share one code object, which no other function has.
_AND = and_masks().__code__
_WINDOW = sliding_window_overlay(1).__code__
_TWO_SIDED_WINDOW = sliding_window_bidirectional_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_CHUNKED = chunked_overlay(1, torch.empty(0)).__code__
# Newer versions of transformers map the indices of packed sequences to positions.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _remap(causal_mask_function, torch.empty(0)).__code__ if _remap else None


class _Structure(NamedTuple):
    """Intersection of mask conditions.

    Attributes:
        left, right: as in `masks.sliding_window`, around the position of the query.
        packed: (batch, tokens) integers each; tokens with equal numbers attend to each other.
        chunked: chunk sizes, and (batch,) numbers of left-padding tokens to skip.
        positions: (batch, tokens) integers each; left and right count positions instead of tokens.
            Both are equivalent if positions rise by one within each packed sequence.
    """

    left: int = -1
    right: int = -1
    packed: tuple[Tensor, ...] = ()
    chunked: tuple[tuple[int, Tensor], ...] = ()
    positions: tuple[Tensor, ...] = ()


_EVERYTHING = _Structure()


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Compute the attention mask of a forward pass, for transformers' AttentionMaskInterface.

    Converted to a Mask: the library's causal, bidirectional, sliding-window, chunked and packed
    (position_ids) functions and their intersections, at any cache offset. Evaluated position by
    position: user functions and unions. In a compiled graph windows, chunks and packing are also
    evaluated, because torch.compile can't read the closures that it traces.

    Args:
        batch_size, q_length, kv_length: the shape.
        q_offset, kv_offset: positions of the first query and the first key; q_offset is an
            integer tensor with a static cache.
        mask_function: the visible keys, as a function of indices.
        attention_mask: (batch, tokens) bool, True for real tokens, or None. A `ModelMask` from an
            earlier call (`generate` computes masks ahead) is returned unchanged.
        allow_is_causal_skip, allow_is_bidirectional_skip: the model does not need the causal or
            the bidirectional mask as a tensor.
        device: of the mask.
        dtype: of float masks, for models that support no other masks.
        config: of the model.

    Returns:
        None if every key is visible. A (batch, 1, 1, kv_length) bool tensor for padding alone and
        for a single query. A `ModelMask` for causal, sliding-window, chunked and packed attention,
        with or without padding. In all other cases, and if the model needs a tensor, transformers'
        (batch, 1, q_length, kv_length) bool tensor. A model that supports only eager attention gets
        a float mask wherever eager attention gets one.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)

    def own() -> Tensor:
        """Return the dense tensor that transformers makes."""
        tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=cast(int, q_offset),
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            device=device,
            **kwargs,
        )
        assert tensor is not None  # neither skip is allowed
        return added(tensor, dtype) if adds else tensor

    adds = config is not None and _adds_masks(type(config))
    structure = None
    if (
        isinstance(kv_offset, int)
        and (attention_mask is None or attention_mask.dim() == 2)
        and not torch.jit.is_tracing()  # sizes are tensors under jit.trace
    ):
        structure = _structure(mask_function)
    if structure is not None and not _counts_tokens(structure):
        structure = None
    # The library disallows skipping for all packed masks, so there the flags do not tell whether
    # the model needs a tensor.
    if structure is None or not (
        allow_is_causal_skip or allow_is_bidirectional_skip or structure.packed
    ):
        return own()
    keys = _key_mask(attention_mask, kv_length, kv_offset)
    mask: Mask | None = None
    if _all_visible(structure, shape, q_offset, kv_offset):
        if not adds or (keys is None and allow_is_bidirectional_skip):
            return keys
        mask = Mask()
    elif q_length > 1 or adds:
        # For a single query, the dense tensor is just a key mask and costs the same.
        mask = _mask(structure, shape, q_offset, kv_offset, device)
    if mask is None:
        return own()
    if keys is not None:
        mask = mask & masks.dense(keys)
    return stand_in(mask, shape, device, dtype if adds else torch.bool, own)


@torch.compiler.assume_constant_result
def _adds_masks(config: type) -> bool:
    """Return True for models that support only additive float masks.

    The library expects a model that supports sdpa to accept bool masks. Other models may pad a mask
    with 0.0, concatenate it with a float one, or rely on it not being None.
    """
    return _adds_masks_at_first(config)


@functools.cache
def _adds_masks_at_first(config: type) -> bool:
    bases = [base for base in config.__mro__ if issubclass(base, PreTrainedConfig)]
    for base in bases:  # a user's config may extend a library config and define no models
        models = [model for model in _models_beside(base) if model.config_class is base]
        models = models or [model for model in _loaded_models() if model.config_class is base]
        if models:
            return not any(model._supports_sdpa for model in models)
    # Part of another config, or unknown: a model that supports only float masks must get those.
    beside = next(filter(None, map(_models_beside, bases)), [])
    return not (beside and all(model._supports_sdpa for model in beside))


def _models_beside(config: type) -> list[type[PreTrainedModel]]:
    """Return the models of the modeling file beside a config's file."""
    name = config.__module__.replace("configuration_", "modeling_")
    try:
        library = importlib.import_module(name)
    except ImportError:  # user code that does not follow the library's file names
        return []
    return [
        value
        for value in vars(library).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == name
        and value is not PreTrainedModel
    ]


def _loaded_models() -> list[type[PreTrainedModel]]:
    found = [PreTrainedModel]
    for kind in found:  # the list grows while it is iterated
        found.extend(kind.__subclasses__())
    return found


def _structure(function: Callable[..., Any]) -> _Structure | None:
    """Return the structure of a mask function; None if the function is not recognised."""
    if function is causal_mask_function:
        return _Structure(right=0)
    if function is bidirectional_mask_function:
        return _EVERYTHING
    if torch.compiler.is_compiling() or not isinstance(function, FunctionType):
        return None
    code = function.__code__
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    names = dict(zip(code.co_freevars, cells, strict=True))
    if code is _AND:
        return _intersection([_structure(part) for part in names["mask_functions"]])
    if code is _PACKED:
        return _Structure(packed=(names["packed_sequence_mask"],))
    if code is _REMAPPED:
        return _at_positions(_structure(names["mask_function"]), names["position_ids"])
    if code is _CHUNKED:
        return _Structure(chunked=((names["chunk_size"], names["left_padding"]),))
    if code is _WINDOW and names["sliding_window"] > 0:
        return _Structure(left=names["sliding_window"] - 1)  # the library counts the query too
    if code is _TWO_SIDED_WINDOW:
        return _Structure(names["sliding_window"], names["sliding_window"])
    return None


def _intersection(parts: list[_Structure | None]) -> _Structure | None:
    whole = _EVERYTHING
    for part in parts:
        if part is None:
            return None
        whole = _Structure(
            _narrower(whole.left, part.left),
            _narrower(whole.right, part.right),
            whole.packed + part.packed,
            whole.chunked + part.chunked,
            whole.positions + part.positions,
        )
    return whole


def _at_positions(structure: _Structure | None, positions: Tensor) -> _Structure | None:
    """Return a structure with positions in place of token indices; None if not supported."""
    if structure is None or structure.packed or structure.positions:
        return None
    chunks = tuple(
        (positions - left_out.to(positions.device)[:, None]) // size
        for size, left_out in structure.chunked
    )
    return _Structure(structure.left, structure.right, chunks, positions=(positions,))


def _counts_tokens(structure: _Structure) -> bool:
    """Return True if positions, if any, rise by one within each packed sequence."""
    for positions in structure.positions:
        if not plain_eager(positions, *structure.packed) or captured(positions):
            continue  # values can't be read; the library derives both from the same position_ids
        known = find_packed_sequence_indices(positions)
        if known is not None and not any(torch.equal(known, ids) for ids in structure.packed):
            return False
    return True


def _narrower(a: int, b: int) -> int:
    return max(a, b) if -1 in (a, b) else min(a, b)


def _all_visible(
    structure: _Structure, shape: tuple[int, ...], q_offset: int | Tensor, kv_offset: int
) -> bool:
    """Return True if every key is known to be visible to every query, as in decoding."""
    if structure.packed or structure.chunked:
        return False
    left, right = structure.left, structure.right
    if left == right == -1:
        return True
    q_length, kv_length = shape[2:]
    if q_length > 1 or not isinstance(q_offset, int):
        return False
    position = q_offset - kv_offset
    return (left == -1 or position <= left) and (right == -1 or position + right >= kv_length - 1)


def _mask(
    structure: _Structure,
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
) -> Mask | None:
    """Convert a structure to a Mask; None if no Mask can express it at these offsets."""
    _, _, q_length, kv_length = shape
    parts = []
    if structure.left != -1 or structure.right != -1:
        parts.append(_band(structure.left, structure.right, shape, q_offset - kv_offset))
    for ids in structure.packed:
        if not isinstance(q_offset, int):
            return None
        queries = ids[:, q_offset : q_offset + q_length]
        keys = ids[:, kv_offset : kv_offset + kv_length]
        whole = queries.shape[1] == q_length and keys.shape[1] == kv_length
        parts.append(masks.documents(queries, keys) if whole else None)
    for size, left_out in structure.chunked:
        first = left_out.to(device)[:, None]
        queries = torch.arange(q_length, device=device) + q_offset - first
        keys = torch.arange(kv_length, device=device) + kv_offset - first
        parts.append(masks.documents(queries // size, keys // size))
    known = [part for part in parts if part is not None]
    return functools.reduce(Mask.__and__, known) if len(known) == len(parts) else None


def _band(
    left: int, right: int, shape: tuple[int, int, int, int], offset: int | Tensor
) -> Mask | None:
    """Return the Mask of a band: `left` keys before and `right` after key i + offset for query i.

    None if no Mask can express it.
    """
    batch, _, q_length, kv_length = shape
    if isinstance(offset, int):
        if offset == 0:
            return masks.sliding_window(left, right)
        if offset == kv_length - q_length:
            return masks.sliding_window(left, right, align="bottom_right")
    if right != 0:
        return None
    # right == 0: no key after the last query is visible, so a larger cache can be cut off there.
    end = offset + q_length
    if isinstance(end, Tensor):
        lengths = masks.padding(end.reshape(1).expand(batch))
    elif 0 <= end <= kv_length:
        lengths = masks.padding([end] * batch)
    else:
        return None
    return lengths & masks.sliding_window(left, right, align="bottom_right")


def _key_mask(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    if padding is None:
        return None
    keys = cast(Tensor, prepare_padding_mask(padding, kv_length, kv_offset))
    return keys[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)
