"""The masks of Hugging Face transformers as structure.

The library describes a mask by a function of indices, an opaque composition of closures, and lets
the attention implementation make of it what it wants. `attention_mask` recognises the library's
own functions, by their code, and reads what they close over; whatever else is in a composition
(a user's function, a union) is evaluated position by position, as for sdpa. So a mask is slow at
worst, never wrong.
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

# Every closure that one of these makes has the same code object, and no other function has it.
_AND = and_masks().__code__
_WINDOW = sliding_window_overlay(1).__code__
_TWO_SIDED_WINDOW = sliding_window_bidirectional_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_CHUNKED = chunked_overlay(1, torch.empty(0)).__code__
# Newer versions of transformers look up positions for the indices of packed sequences.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _remap(causal_mask_function, torch.empty(0)).__code__ if _remap else None


class _Structure(NamedTuple):
    """Conditions that hold together.

    Attributes:
        left, right: as of `masks.sliding_window`, around the position of the query.
        packed: (batch, tokens) integers each; tokens of the same number see each other.
        chunked: chunk sizes, and (batch,) tokens to leave out on the left.
        positions: (batch, tokens) integers each; left and right count these. That is as good as
            counting tokens if they rise by one within each packed sequence.
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
    """A mask function of transformers' AttentionMaskInterface.

    What becomes structure: the library's causal, bidirectional, sliding-window, chunked and packed
    (position_ids) functions and their intersections, at any offset of a cache. What is evaluated,
    position by position: functions of the user, unions, and, because torch.compile can't read
    closures that it traces, windows, chunks and packing inside of a compiled graph.

    Args:
        batch_size, q_length, kv_length: the shape.
        q_offset, kv_offset: positions of the first query and the first key; q_offset is an
            integer tensor with a static cache.
        mask_function: what is visible, as a function of indices.
        attention_mask: (batch, tokens) bool, True for real tokens, or None; a `ModelMask` that
            this function made before (`generate` asks ahead) is the answer again.
        allow_is_causal_skip, allow_is_bidirectional_skip: the model does not need the causal or
            the bidirectional mask as a tensor.
        device: of the mask.
        dtype: of float masks, for the models that know no others.
        config: of the model.

    Returns:
        None where everything is visible, a (batch, 1, 1, kv_length) bool tensor for padding alone
        and for a single query, a `ModelMask` for causal, sliding-window, chunked and packed
        attention with or without padding, and transformers' own (batch, 1, q_length, kv_length)
        bool tensor for whatever else, and where the model needs a tensor. For a model that was
        written for eager attention alone: a float mask wherever eager attention gets one.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)

    def own() -> Tensor:
        """The tensor that transformers makes."""
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
        and not torch.jit.is_tracing()  # sizes are tensors there
    ):
        structure = _structure(mask_function)
    if structure is not None and not _counts_tokens(structure):
        structure = None
    # Where it packs, the library forbids to leave out the mask, so that says nothing of the model.
    if structure is None or not (
        allow_is_causal_skip or allow_is_bidirectional_skip or structure.packed
    ):
        return own()
    keys = _key_mask(attention_mask, kv_length, kv_offset)
    mask: Mask | None = None
    if _sees_all(structure, shape, q_offset, kv_offset):
        if not adds or (keys is None and allow_is_bidirectional_skip):
            return keys
        mask = Mask()
    elif q_length > 1 or adds:
        # For a single query, a tensor is a key mask: it says the same at the same cost.
        mask = _mask(structure, shape, q_offset, kv_offset, device)
    if mask is None:
        return own()
    if keys is not None:
        mask = mask & masks.dense(keys)
    return stand_in(mask, shape, device, dtype if adds else torch.bool, own)


@torch.compiler.assume_constant_result
def _adds_masks(config: type) -> bool:
    """True for models that were written for masks that are added to the scores, and no others.

    Of a model that supports sdpa the library expects that it knows bool masks. One that does not
    may pad a mask with 0.0, join it with a float one, and rely on there being one.
    """
    return _adds_masks_at_first(config)


@functools.cache
def _adds_masks_at_first(config: type) -> bool:
    bases = [base for base in config.__mro__ if issubclass(base, PreTrainedConfig)]
    for base in bases:  # a user's config may extend one of the library and bring no models
        models = [model for model in _models_beside(base) if model.config_class is base]
        models = models or [model for model in _loaded_models() if model.config_class is base]
        if models:
            return not any(model._supports_sdpa for model in models)
    # Part of another config, or unknown: whoever knows float masks only must not get others.
    beside = next(filter(None, map(_models_beside, bases)), [])
    return not (beside and all(model._supports_sdpa for model in beside))


def _models_beside(config: type) -> list[type[PreTrainedModel]]:
    """The models of the file that belongs to that of a config."""
    name = config.__module__.replace("configuration_", "modeling_")
    try:
        library = importlib.import_module(name)
    except ImportError:  # code of a user, under names of its own
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
    for kind in found:  # it grows on the way
        found.extend(kind.__subclasses__())
    return found


def _structure(function: Callable[..., Any]) -> _Structure | None:
    """The structure of a mask function; None if it is not known."""
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
        return _Structure(left=names["sliding_window"] - 1)  # it counts the query itself
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
    """A structure of positions, which are looked up for each index; None if it is not known."""
    if structure is None or structure.packed or structure.positions:
        return None
    chunks = tuple(
        (positions - left_out.to(positions.device)[:, None]) // size
        for size, left_out in structure.chunked
    )
    return _Structure(structure.left, structure.right, chunks, positions=(positions,))


def _counts_tokens(structure: _Structure) -> bool:
    """True if the positions, if any, rise by one within each packed sequence."""
    for positions in structure.positions:
        if not plain_eager(positions, *structure.packed) or captured(positions):
            continue  # no values to look at; the library makes both of the same position_ids
        known = find_packed_sequence_indices(positions)
        if known is not None and not any(torch.equal(known, ids) for ids in structure.packed):
            return False
    return True


def _narrower(a: int, b: int) -> int:
    return max(a, b) if -1 in (a, b) else min(a, b)


def _sees_all(
    structure: _Structure, shape: tuple[int, ...], q_offset: int | Tensor, kv_offset: int
) -> bool:
    """True if every query is known to see every key, as a decoded token does."""
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
    """The Mask of a structure; None if there is none at these offsets."""
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
    """Query i stands at key i + offset and sees `left` keys before that and `right` after it."""
    batch, _, q_length, kv_length = shape
    if isinstance(offset, int):
        if offset == 0:
            return masks.sliding_window(left, right)
        if offset == kv_length - q_length:
            return masks.sliding_window(left, right, align="bottom_right")
    if right != 0:
        return None
    # Nobody sees past the last query, so a cache with room behind it is one that ends there.
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
