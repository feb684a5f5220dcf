"""Key-value caches for autoregressive decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Capacities are multiples of BLOCK rows. A full cache grows by at least half its length, so growth
# copies about two rows per appended row at any length.
BLOCK = 64


class KeyValueCache:
    """Cache of the keys and values of one self-attention, in tensors that grow by blocks.

    All sequences have the same length. `append` writes new positions. Alternatively, call
    `make_room`, let `decode_attention` write the positions and advance `length`.

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
        """The key buffer, (batch, num_heads, capacity, head_dim); undefined beyond `length`.

        Raises:
            ValueError: nothing is allocated yet (`values` and `lengths` raise it too).
        """
        return _require_allocated(self._keys)

    @property
    def values(self) -> Tensor:
        """The value buffer, (batch, num_heads, capacity, head_dim_v); undefined beyond `length`."""
        return _require_allocated(self._values)

    @property
    def lengths(self) -> Tensor:
        """The length of each sequence, (batch,) int32; a new tensor, to be shared by the layers."""
        keys = self.keys
        return torch.full((keys.shape[0],), self.length, dtype=torch.int32, device=keys.device)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions.

        Args:
            key: (batch, num_heads, new positions, head_dim).
            value: (batch, num_heads, new positions, head_dim_v).

        Returns:
            Views of the keys and values of all positions. Later calls may write beyond their end.

        Raises:
            ValueError: gradients would have to flow through the cache.
        """
        self.make_room(key, value)
        end = self.length + key.shape[2]
        keys, values = self.keys, self.values
        for kept, new in ((keys, key), (values, value)):
            kept[:, :, self.length : end] = new
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def make_room(self, key: Tensor, value: Tensor) -> None:
        """Grow the buffers if needed to fit new positions; arguments as in `append`."""
        check_no_grad(key, value)
        end = self.length + key.shape[2]
        self._keys, self._values = (
            _ensure_capacity(kept, self.length, end, new)
            for kept, new in ((self._keys, key), (self._values, value))
        )

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch, in this order; a row may occur more than once."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (
                kept[:, :, : self.length].index_select(0, rows)
                for kept in (self._keys, self._values)
            )


def check_no_grad(*tensors: Tensor) -> None:
    """Raise ValueError if gradients would have to flow through a cache."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a cache must be used under torch.no_grad(): its tensors are overwritten, so no "
            "gradient can go through them"
        )


def _require_allocated(kept: Tensor | None) -> Tensor:
    if kept is None:
        raise ValueError("the cache must have positions or room for them, got an empty one")
    return kept


def _ensure_capacity(kept: Tensor | None, length: int, end: int, like: Tensor) -> Tensor:
    """Return a tensor with the first `length` positions of `kept` and capacity for `end`."""
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

    The keys and values of the memory are projected once. The batch may be a multiple of the memory
    batch: sequences that share a memory, such as beams, must be consecutive.

    Attributes:
        own: self-attention cache of each layer.
        memory: keys and values of the cross-attention of each layer, each of shape (memory batch,
            num_heads, S, head_dim).
        memory_key_padding_mask: (memory batch, S), or None.
    """

    own: list[KeyValueCache]
    memory: list[tuple[Tensor, ...]]
    memory_key_padding_mask: Tensor | None

    @property
    def length(self) -> int:
        """Number of decoded positions."""
        return self.own[0].length if self.own else 0

    def select(self, rows: Tensor, memories: Tensor | None = None) -> None:
        """Select sequences, in this order.

        Args:
            rows: (sequences,) int64, indices into the batch; an index may occur more than once.
            memories: int64, indices into the memory batch. None selects all memories; each must
                then have the same number of selected sequences.

        Raises:
            ValueError: without `memories`, a sequence would be assigned to another memory.
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
                "memories must be given where rows do not leave each memory as many sequences, "
                f"in order: got rows {rows.tolist()} of {count} memories with {before} each"
            )

    @contextlib.contextmanager
    def unchanged_on_errors(self) -> Iterator[None]:
        """Discard appended positions if the with block raises."""
        length = self.length
        try:
            yield
        except BaseException:
            for cache in self.own:
                cache.length = length
            raise
