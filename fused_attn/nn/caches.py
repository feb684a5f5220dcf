"""Keys and values that a decoder carries from step to step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_attn.core.caches import KeyValueCache


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
