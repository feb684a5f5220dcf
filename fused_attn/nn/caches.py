"""Keys and values that a decoder carries from step to step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows that a cache grows by at least; and by half of what it has, so that copying what is there
# costs two rows for each one appended, however long it gets.
BLOCK = 64


class KeyValueCache:
    """Keys and values of a self-attention so far, in tensors that grow by blocks.

    Sequences are equally long. `append` writes new positions; or `make_room` for them and
    `decode_attention` writes them, after which `length` is to be advanced.

    Attributes:
        length: positions that are there.

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
        """Sequences; None while there is nothing."""
        return None if self._keys is None else self._keys.shape[0]

    @property
    def keys(self) -> Tensor:
        """(batch, num_heads, capacity, head_dim), the memory itself; anything behind `length`.

        Raises:
            ValueError: there is nothing yet, here as in `values` and `lengths`.
        """
        return _there(self._keys)

    @property
    def values(self) -> Tensor:
        """As `keys`, with head_dim_v."""
        return _there(self._values)

    @property
    def lengths(self) -> Tensor:
        """`length` of each sequence, (batch,) int32: a new tensor, that layers should share."""
        keys = self.keys
        return torch.full((keys.shape[0],), self.length, dtype=torch.int32, device=keys.device)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends positions.

        Args:
            key: (batch, num_heads, new positions, head_dim).
            value: (batch, num_heads, new positions, head_dim_v).

        Returns:
            Keys and values of all positions: views that the next call may write behind.

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
        """Grows, if need be, so that these fit behind what is there; arguments as in `append`."""
        check_no_grad(key, value)
        end = self.length + key.shape[2]
        self._keys, self._values = (
            _with_room(kept, self.length, end, new)
            for kept, new in ((self._keys, key), (self._values, value))
        )

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order; a row may be there twice."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (
                kept[:, :, : self.length].index_select(0, rows)
                for kept in (self._keys, self._values)
            )


def check_no_grad(*tensors: Tensor) -> None:
    """Raises ValueError where gradients would have to flow through a cache."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a cache must be used under torch.no_grad(): its tensors are overwritten, so no "
            "gradient can go through them"
        )


def _there(kept: Tensor | None) -> Tensor:
    if kept is None:
        raise ValueError("the cache must have positions or room for them, got an empty one")
    return kept


def _with_room(kept: Tensor | None, length: int, end: int, like: Tensor) -> Tensor:
    """A tensor with the first `length` positions of `kept` and room for `end`."""
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
    """The state of `TransformerDecoder.step`: of each layer the keys and values of its own
    positions and those of the memory, which are projected once.

    A batch may be several times that of the memory: sequences that share one, such as beams, then
    lie next to each other.

    Attributes:
        own: for each layer.
        memory: for each layer, (batch of the memory, num_heads, S, head_dim) each.
        memory_key_padding_mask: (batch of the memory, S), or None.
    """

    own: list[KeyValueCache]
    memory: list[tuple[Tensor, ...]]
    memory_key_padding_mask: Tensor | None

    @property
    def length(self) -> int:
        """Positions that were decoded."""
        return self.own[0].length if self.own else 0

    def select(self, rows: Tensor, memories: Tensor | None = None) -> None:
        """Keeps these sequences, in this order.

        Args:
            rows: (sequences,) int64 of the batch; one may be there twice.
            memories: the same for what they attend to; None keeps all, of which each must keep as
                many sequences as the others.

        Raises:
            ValueError: without `memories`, a sequence would come to another memory.
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
        """Within the block, an exception takes back what was appended."""
        length = self.length
        try:
            yield
        except BaseException:
            for cache in self.own:
                cache.length = length
            raise
