"""Key-value caches for autoregressive decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.torch_state import needs_grad

# Capacities are multiples of BLOCK positions. A full buffer grows by at least half its length, so
# the amortized cost is about two copied positions per appended position at any length.
BLOCK = 64


class KeyValueCache:
    """Key-value cache of one self-attention layer, in buffers that grow as needed.

    All sequences have the same length. `append` writes new positions. Alternatively, call
    `make_room`, let `decode_attention` write the positions, and then advance `length`.

    Attributes:
        length: number of cached positions.

    Example:
        >>> cache = fused_attn.nn.KeyValueCache()
        >>> query, key, value = (torch.randn(2, 8, 1, 64) for _ in range(3))
        >>> cache.make_room(key, value)
        >>> out = fused_attn.decode_attention(
        ...     query, cache.keys, cache.values, cache_lengths=cache.lengths, key=key, value=value
        ... )
        >>> cache.length += key.shape[2]
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def batch(self) -> int | None:
        """Number of sequences; None before the first allocation."""
        return None if self._keys is None else self._keys.shape[0]

    @property
    def keys(self) -> Tensor:
        """Key buffer, (batch, num_heads, capacity, head_dim); undefined from `length` on.

        Raises:
            ValueError: no buffer is allocated yet. `values` and `lengths` raise this as well.
        """
        return _require_allocated(self._keys)

    @property
    def values(self) -> Tensor:
        """Value buffer, (batch, num_heads, capacity, head_dim_v); undefined from `length` on."""
        return _require_allocated(self._values)

    @property
    def lengths(self) -> Tensor:
        """Length of each sequence, (batch,) int32.

        Each access creates a tensor. Read it once per decoding step and pass it to all layers.
        """
        keys = self.keys
        return torch.full((keys.shape[0],), self.length, dtype=torch.int32, device=keys.device)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions.

        Args:
            key: (batch, num_heads, new positions, head_dim).
            value: (batch, num_heads, new positions, head_dim_v).

        Returns:
            Views of the keys and values of all positions, including the new ones. Later calls may
            write to the same buffers, past the end of these views.

        Raises:
            ValueError: key or value requires grad while gradients are enabled, or its shape or
                dtype does not match the cache or the other tensor.
        """
        self.make_room(key, value)
        end = self.length + key.shape[2]
        keys, values = self.keys, self.values
        for kept, new in ((keys, key), (values, value)):
            kept[:, :, self.length : end] = new
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def make_room(self, key: Tensor, value: Tensor) -> None:
        """Allocate or grow the buffers so that `append(key, value)` fits; `length` is unchanged."""
        check_no_grad(key, value)
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "key and value must have the same batch, heads and positions, got shapes "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        for name, kept, new in (("key", self._keys, key), ("value", self._values, value)):
            if kept is not None and _fixed(new) != _fixed(kept):
                raise ValueError(
                    f"{name} must have the batch, heads, head_dim and dtype of the cache, "
                    f"{_fixed(kept)}, got {_fixed(new)}"
                )
        end = self.length + key.shape[2]
        self._keys, self._values = (
            _ensure_capacity(kept, self.length, end, new)
            for kept, new in ((self._keys, key), (self._values, value))
        )

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences at the int64 indices `rows`, which may repeat."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (
                kept[:, :, : self.length].index_select(0, rows)
                for kept in (self._keys, self._values)
            )


def check_no_grad(*tensors: Tensor) -> None:
    """Raise ValueError if gradients are enabled and any of the tensors requires grad."""
    if needs_grad(*tensors):
        raise ValueError(
            "a cache must be used under torch.no_grad(): its tensors are overwritten, so no "
            "gradient can flow through them"
        )


def _fixed(tensor: Tensor) -> tuple[Any, ...]:
    """Return the batch, heads, head_dim and dtype, which new keys or values must share."""
    return (*tensor.shape[:2], tensor.shape[3], tensor.dtype)


def _require_allocated(kept: Tensor | None) -> Tensor:
    if kept is None:
        raise ValueError("the cache must not be empty: call append or make_room first")
    return kept


def _ensure_capacity(kept: Tensor | None, length: int, end: int, like: Tensor) -> Tensor:
    """Return `kept` if it fits `end` positions, else a larger copy of its first `length` positions.

    Outside of inference mode, an inference tensor is always copied, because it is read-only there.
    """
    frozen = kept is not None and kept.is_inference() and not torch.is_inference_mode_enabled()
    if kept is not None and kept.shape[2] >= end and not frozen:
        return kept
    wanted = max(end, length + length // 2)
    batch, num_heads, _, head_dim = like.shape
    grown = like.new_empty(batch, num_heads, -(-wanted // BLOCK) * BLOCK, head_dim)
    if kept is not None:
        grown[:, :, :length] = kept[:, :, :length]
    return grown


@dataclass
class DecoderCache:
    """State of `TransformerDecoder.step`: the self- and cross-attention caches of each layer.

    The keys and values of the memory are projected once. The batch size may be a multiple of the
    memory batch size. Sequences that share a memory, such as beams, must then be consecutive.

    Attributes:
        own: self-attention cache of each layer.
        memory: projected keys and values for the cross-attention of each layer, each with shape
            (memory batch, num_heads, S, head_dim).
        memory_key_padding_mask: (memory batch, S), or None; see `MultiheadAttention.forward`.
    """

    own: list[KeyValueCache]
    memory: list[tuple[Tensor, ...]]
    memory_key_padding_mask: Tensor | None

    @property
    def length(self) -> int:
        """Number of decoded positions."""
        return self.own[0].length if self.own else 0

    def select(self, rows: Tensor, memories: Tensor | None = None) -> None:
        """Replace the batch by the sequences at the indices `rows`, and optionally the memories.

        Args:
            rows: (sequences,) int64 indices into the batch, which may repeat.
            memories: int64 indices into the memory batch. If None, all memories stay, and `rows`
                must select the same number of sequences for each memory, in the order of memories.

        Raises:
            ValueError: memories is None, and rows would assign a sequence to a different memory.
        """
        if memories is None:
            self._check_groups(rows)
        for cache in self.own:
            cache.select(rows)
        if memories is None:
            return
        self.memory = [tuple(t.index_select(0, memories) for t in pair) for pair in self.memory]
        if self.memory_key_padding_mask is not None:
            self.memory_key_padding_mask = self.memory_key_padding_mask.index_select(0, memories)

    def _check_groups(self, rows: Tensor) -> None:
        if not self.own or self.own[0].batch is None:
            return
        count = self.memory[0][0].shape[0]
        group, before = rows.numel() // max(count, 1), self.own[0].batch // max(count, 1)
        wanted = torch.arange(count, device=rows.device).repeat_interleave(group)
        if group * count != rows.numel() or not torch.equal(rows // before, wanted):
            raise ValueError(
                "rows must select the same number of sequences of each memory, in the order of the "
                f"memories, unless memories is given; got rows {rows.tolist()} for {count} "
                f"memories with {before} sequences each"
            )

    @contextlib.contextmanager
    def unchanged_on_errors(self) -> Iterator[None]:
        """Return a context manager that discards appended positions if its block raises."""
        length = self.length
        try:
            yield
        except BaseException:
            for cache in self.own:
                cache.length = length
            raise
