"""Conversion of Hugging Face transformers mask functions to Masks.

transformers describes a mask by a function of indices, which is composed of closures.
`attention_mask` recognizes the library's functions by their code objects and reads their closure
variables. A composition that contains any other function, such as a user-defined one, is evaluated
at every position, as for sdpa. This is slow but always correct. On a CPU, it is evaluated in blocks
of rows, and becomes a Mask without dense tensors if an equivalent one is found.
"""

from __future__ import annotations

import functools
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
    or_masks,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from fused_attn import masks
from fused_attn.base.torch_state import (
    captured,
    host_readable,
    is_compiling,
    is_intercepted,
    plain_eager,
    traced_as_constant,
)
from fused_attn.integrations.bytecode import closure_of
from fused_attn.integrations.transformers.model_mask import ModelMask, additive_mask, stand_in
from fused_attn.masks import UNLIMITED, Mask
from fused_attn.masks.fields import Shape
from fused_attn.masks.mask_mod import recognized

# All closures returned by one of these functions share a code object, which identifies them.
_AND = and_masks().__code__
_OR = or_masks().__code__
_WINDOW = sliding_window_overlay(1).__code__
_TWO_SIDED_WINDOW = sliding_window_bidirectional_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_CHUNKED = chunked_overlay(1, torch.empty(0)).__code__
# Newer versions of transformers have blocks of tokens that attend to each other, such as images,
# and map the indices of packed sequences to positions.
_blocks = getattr(masking_utils, "blockwise_overlay", None)
_BLOCKS = _blocks(torch.empty(0)).__code__ if _blocks else None
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _remap(causal_mask_function, torch.empty(0)).__code__ if _remap else None


class _Terms(NamedTuple):
    """Conditions that a visible key must all fulfill; the default imposes none.

    Attributes:
        left, right: as in `masks.sliding_window`, relative to the position of the query.
        packed: sequence ids, each (batch, tokens) integers. Tokens with equal ids attend to each
            other.
        chunked: pairs of a chunk size and the number of left-padding tokens to skip, (batch,)
            integers.
        positions: token positions, each (batch, tokens) integers. If given, left and right count
            positions instead of tokens. Both counts are equal if positions increase by one within
            each packed sequence.
        blocks: block ids, each (batch, tokens) integers. Tokens with equal ids attend to each
            other; those with negative ids attend to nothing.
        unions: tuples of structures; a visible key must fulfill at least one of each tuple.
    """

    left: int = -1
    right: int = -1
    packed: tuple[Tensor, ...] = ()
    chunked: tuple[tuple[int, Tensor], ...] = ()
    positions: tuple[Tensor, ...] = ()
    blocks: tuple[Tensor, ...] = ()
    unions: tuple[tuple[_Terms, ...], ...] = ()


_EVERYTHING = _Terms()


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

    The library's causal, bidirectional, sliding-window, chunked and packed (position_ids) functions
    and their intersections are converted to a Mask, at any cache offset; on a CPU also unions with
    blocks of consecutive tokens (images). User-defined functions are evaluated at every position.
    In a compiled graph, windows, chunks and packing are evaluated as well, because torch.compile
    cannot read the closures that it traces.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: positions of the first query and the first key; q_offset is an
            integer tensor with a static cache.
        mask_function: function of indices that returns True for visible keys.
        attention_mask: (batch, tokens) bool, True for real tokens, or None. `generate` computes
            masks in advance and passes them here as a `ModelMask`, which is returned unchanged.
        allow_is_causal_skip, allow_is_bidirectional_skip: True if the model does not need a causal
            or a bidirectional mask as a tensor.
        device: device of the mask.
        dtype: dtype of float masks, for models that support only those.
        config: configuration of the model.

    Returns:
        None if every key is visible. For padding alone and for a single query, a bool tensor
        (batch, 1, 1, kv_length). For causal, sliding-window, chunked and packed attention, with or
        without padding, a `ModelMask`; on a CPU also for all other functions. Otherwise, the bool
        tensor (batch, 1, q_length, kv_length) of transformers. Models that support only eager
        attention get a float mask wherever eager attention gets one.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)

    def of_library(first: int, count: int, padding: Tensor | None = None) -> Tensor:
        """Return the dense mask that transformers computes for some queries."""
        tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=count,
            kv_length=kv_length,
            q_offset=cast(int, q_offset + first),
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            device=device,
            **kwargs,
        )
        assert tensor is not None  # neither skip is allowed
        return tensor

    def dense_mask() -> Tensor:
        """Return the dense mask tensor that transformers computes."""
        tensor = of_library(0, q_length, attention_mask)
        return additive_mask(tensor, dtype) if additive else tensor

    additive = config is not None and _needs_additive(type(config))
    structure = None
    readable = (
        isinstance(kv_offset, int)
        and (attention_mask is None or attention_mask.dim() == 2)
        and not torch.jit.is_tracing()  # sizes are tensors under jit.trace
    )
    if readable:
        structure = _structure(mask_function)
    if structure is not None and not _counts_tokens(structure):
        structure = None
    # transformers disallows skipping for all packed masks and unions, so for these masks the flags
    # do not show whether the model needs a tensor.
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    if structure is not None and not (skips or structure.packed or structure.unions):
        return dense_mask()
    keys = _key_mask(attention_mask, kv_length, kv_offset) if readable else None
    mask: Mask | None = None
    if structure is not None and _all_visible(structure, shape, q_offset, kv_offset):
        if not additive or (keys is None and allow_is_bidirectional_skip):
            return keys
        mask = Mask()
    elif structure is not None and (q_length > 1 or additive):
        # For a single query, the dense tensor is only a key mask, which is as cheap as a Mask.
        mask = _mask(structure, shape, q_offset, kv_offset, device)
    on_cpu = torch.device(device).type == "cpu" and not is_intercepted()
    if mask is None and readable and on_cpu and q_length > 1:
        mask = recognized(
            lambda rows: of_library(rows.start, len(rows)), shape, shape, torch.device(device)
        )
    if mask is None:
        return dense_mask()
    if keys is not None:
        mask = mask & masks.dense(keys)
    return stand_in(mask, shape, device, dtype if additive else torch.bool, dense_mask)


@traced_as_constant
def _needs_additive(config: type) -> bool:
    """Return True for models that support only additive float masks.

    transformers expects models that support sdpa to accept bool masks. Other models may pad a mask
    with 0.0, concatenate it with a float mask, or require a mask that is not None.
    """
    return _find_needs_additive(config)


@functools.cache
def _find_needs_additive(config: type) -> bool:
    models = _loaded_models()
    bases = [base for base in config.__mro__ if issubclass(base, PreTrainedConfig)]
    files = [base.__module__.replace("configuration_", "modeling_") for base in bases]
    for base, file in zip(bases, files, strict=True):
        own = [model for model in models if model.config_class is base]
        own = [model for model in own if model.__module__ == file] or own
        if own:
            return not any(model._supports_sdpa for model in own)
    # The config is nested in another config, or unknown. Return False only if all models of the
    # file support sdpa, because a model that supports only float masks requires them.
    for file in files:
        beside = [model for model in models if model.__module__ == file]
        if beside:
            return not all(model._supports_sdpa for model in beside)
    return True


def _loaded_models() -> list[type[PreTrainedModel]]:
    """Return all imported model classes, which include the one that requests a mask."""
    found = [PreTrainedModel]
    for kind in found:  # the list grows while it is iterated
        found.extend(kind.__subclasses__())
    return found


def _structure(function: Callable[..., Any]) -> _Terms | None:
    """Return the structure of a mask function; None if the function is not recognized."""
    if function is causal_mask_function:
        return _Terms(right=0)
    if function is bidirectional_mask_function:
        return _EVERYTHING
    if is_compiling() or not isinstance(function, FunctionType):
        return None
    code, names = function.__code__, closure_of(function)
    if code is _AND:
        return _intersection([_structure(part) for part in names["mask_functions"]])
    if code is _OR:
        parts = [_structure(part) for part in names["mask_functions"]]
        known = tuple(part for part in parts if part is not None)
        return _Terms(unions=(known,)) if len(known) == len(parts) else None
    if code is _BLOCKS:
        return _Terms(blocks=(names["block_sequence_ids"],))
    if code is _PACKED:
        return _Terms(packed=(names["packed_sequence_mask"],))
    if code is _REMAPPED:
        return _at_positions(_structure(names["mask_function"]), names["position_ids"])
    if code is _CHUNKED:
        return _Terms(chunked=((names["chunk_size"], names["left_padding"]),))
    if code is _WINDOW and names["sliding_window"] > 0:
        return _Terms(left=names["sliding_window"] - 1)  # it includes the query
    if code is _TWO_SIDED_WINDOW:
        return _Terms(names["sliding_window"], names["sliding_window"])
    return None


def _intersection(parts: list[_Terms | None]) -> _Terms | None:
    whole = _EVERYTHING
    for part in parts:
        if part is None:
            return None
        whole = _Terms(
            _narrower(whole.left, part.left),
            _narrower(whole.right, part.right),
            whole.packed + part.packed,
            whole.chunked + part.chunked,
            whole.positions + part.positions,
            whole.blocks + part.blocks,
            whole.unions + part.unions,
        )
    return whole


def _at_positions(structure: _Terms | None, positions: Tensor) -> _Terms | None:
    """Convert a structure from token indices to positions; None if not supported."""
    if structure is None or structure.packed or structure.positions:
        return None
    if structure.blocks or structure.unions:
        return None
    chunks = tuple(
        (positions - left_out.to(positions.device)[:, None]) // size
        for size, left_out in structure.chunked
    )
    return _Terms(structure.left, structure.right, chunks, positions=(positions,))


def _counts_tokens(structure: _Terms) -> bool:
    """Return True if the positions, if any, increase by one within each packed sequence."""
    for positions in structure.positions:
        if not plain_eager(positions, *structure.packed) or captured(positions):
            continue  # not readable, but transformers derives both from position_ids
        known = find_packed_sequence_indices(positions)
        if known is not None and not any(torch.equal(known, ids) for ids in structure.packed):
            return False
    return True


def _narrower(a: int, b: int) -> int:
    return max(a, b) if -1 in (a, b) else min(a, b)


def _all_visible(
    structure: _Terms, shape: tuple[int, ...], q_offset: int | Tensor, kv_offset: int
) -> bool:
    """Return True if every key is known to be visible to every query, as in decoding."""
    if structure.packed or structure.chunked or structure.blocks or structure.unions:
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
    structure: _Terms,
    shape: Shape,
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
    for united in (*structure.unions, *((_Terms(blocks=(ids,)),) for ids in structure.blocks)):
        table = _united(united, shape, q_offset, kv_offset, device)
        parts.append(None if table is None else Mask(intervals=(table[:, None],)))
    known = [part for part in parts if part is not None]
    return functools.reduce(Mask.__and__, known) if len(known) == len(parts) else None


def _united(
    parts: tuple[_Terms, ...],
    shape: Shape,
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
) -> Tensor | None:
    """Return the intervals of keys that a union makes visible, int64 (batch or 1, q_length, 2).

    Return None if the visible keys of a query are not consecutive, or if tensors cannot be read.
    """
    if torch.device(device).type != "cpu" or is_intercepted() or not isinstance(q_offset, int):
        return None
    tables = [_interval(part, shape, q_offset, kv_offset) for part in parts]
    known = [table for table in tables if table is not None]
    if not known or len(known) < len(tables):
        return None
    total = known[0]
    for own in known[1:]:
        (lo, hi), (own_lo, own_hi) = total.unbind(-1), own.unbind(-1)
        both = (lo < hi) & (own_lo < own_hi)
        if bool((both & (torch.maximum(lo, own_lo) > torch.minimum(hi, own_hi))).any()):
            return None  # the union has a gap
        united = torch.stack([torch.minimum(lo, own_lo), torch.maximum(hi, own_hi)], dim=-1)
        seen = torch.where((lo < hi)[..., None], total, own)
        total = torch.where(both[..., None], united, seen)
    return total


def _interval(structure: _Terms, shape: Shape, q_offset: int, kv_offset: int) -> Tensor | None:
    """Return the intervals of keys that one structure makes visible, in the shape of `_united`."""
    if structure.packed or structure.chunked or structure.positions or structure.unions:
        return None
    kv_length = shape[3]
    position = torch.arange(shape[2]) + (q_offset - kv_offset)  # key index of each query
    left = UNLIMITED if structure.left == -1 else structure.left
    right = UNLIMITED if structure.right == -1 else structure.right
    lo, hi = ((position + at).clamp(0, kv_length) for at in (-left, right + 1))
    lo, hi = lo[None], hi[None]
    for ids in structure.blocks:
        ids = ids[:, kv_offset : kv_offset + kv_length].cpu()
        runs = _runs(ids)
        if (
            runs is None
            or ids.shape[1] != kv_length
            or not 0 <= position[0] <= position[-1] < kv_length
        ):
            return None
        first, end = (t[:, position] for t in runs)
        lo, hi = torch.maximum(lo, first), torch.minimum(hi, end)
    return torch.stack([lo, hi], dim=-1)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the begin and the end of each token's block, as two (batch, tokens) tensors.

    The end is 0 for tokens outside of all blocks. Return None if a block is not contiguous.
    """
    token = torch.arange(ids.shape[1])
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    names = torch.where(starts & (ids >= 0), ids, -1 - token).sort(1).values
    if bool((names[:, 1:] == names[:, :-1]).any()):
        return None
    first = torch.where(starts, token, 0).cummax(1).values
    after = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], dim=1)
    end = torch.where(after, token + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return first, torch.where(ids >= 0, end, 0)


def _band(left: int, right: int, shape: Shape, offset: int | Tensor) -> Mask | None:
    """Return the Mask of a band around key i + offset for query i; None if not expressible.

    `left` keys before that key and `right` keys after it are visible; -1 means no limit.
    """
    batch, _, q_length, kv_length = shape
    if isinstance(offset, int):
        if offset == 0:
            return masks.sliding_window(left, right)
        if offset == kv_length - q_length:
            return masks.sliding_window(left, right, align="bottom_right")
    if right != 0:
        return None
    # With right == 0, no key after the last query is visible, so later keys of a larger cache can
    # be masked as padding.
    end = offset + q_length
    if isinstance(end, Tensor):
        lengths = masks.padding(end.reshape(1).expand(batch))
    elif 0 <= end <= kv_length:
        lengths = masks.padding([end] * batch)
    else:
        return None
    return lengths & masks.sliding_window(left, right, align="bottom_right")


def _key_mask(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Return the mask of the keys that are real tokens; None if all are known to be real."""
    if padding is None:
        return None
    keys = cast(Tensor, prepare_padding_mask(padding, kv_length, kv_offset))
    keys = keys[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)
    return None if host_readable(keys) and bool(keys.all()) else keys
