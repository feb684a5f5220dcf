"""Masks with the names and constructors of xformers.ops.fmha.attn_bias."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.call.packed import cumulative
from fused_attn.compat.rows import check_used, rows_of_pages, used_rows
from fused_attn.compat.xformers.ops.fmha.seqlens import Device, SeqLenInfo
from fused_attn.masks import Mask
from fused_attn.masks.memo import recall_on_tensor

T = TypeVar("T", bound="BlockDiagonalMask")
Lengths = Sequence[int]


class AttentionBias:
    """Base class of masks, which are a diagonal band in each sequence."""

    _align: ClassVar[str | None] = None  # alignment of the band; None without a band
    _window_size: int = 0  # keys per query in a causal band; 0 for no limit
    _mask = _padded_mask = cast("Mask | None", None)  # caches

    def _band(self) -> tuple[int, int, str] | None:
        """Return the arguments of masks.sliding_window for the band; None without a band."""
        return None if self._align is None else (self._window_size - 1, 0, self._align)

    @property
    def mask(self) -> Mask | None:
        """Mask of each sequence, always the same object; None if all positions are visible."""
        band = self._band()
        if self._mask is None and band is not None:
            self._mask = masks.sliding_window(*band)
        return self._mask

    def to(self, device: Device) -> Any:
        """Return the mask with its tensors on a device."""
        return self

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        """Return the dense mask (..., seqlen_q, seqlen_k), 0 or -inf; it is meant for tests."""
        return _dense(self._visible(*shape[-2:]), shape, dtype, device)

    def _visible(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        distances = torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None]
        left, right, align = self._band() or (-1, seqlen_k, "top_left")
        distances -= seqlen_k - seqlen_q if align == "bottom_right" else 0
        return (distances <= right) & ((distances >= -left) | (left < 0))

    def _check_window(self) -> None:
        if self._window_size <= 0:
            raise ValueError(f"window_size must be > 0, got {self._window_size}")


def _dense(visible: Tensor, shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return bias.expand(*shape[:-2], -1, -1).to(device)


class LowerTriangularMask(AttentionBias):
    """Causal mask, aligned at the top left."""

    _align = "top_left"

    def __init__(self, device: Device = None) -> None:
        """Create the mask; `device` is ignored, because the mask has no tensors."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Return the mask with a float tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal mask, and a float tensor (batch, num_heads, seqlen_q, seqlen_k) that is added."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def to(self, device: Device) -> LowerTriangularMaskWithTensorBias:
        """Return the mask with its tensor on a device."""
        return LowerTriangularMaskWithTensorBias(self.bias.to(device))

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        """Return the dense mask, including the tensor."""
        return super().materialize(shape, dtype, device) + self.bias.to(device, dtype)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal mask, aligned at the bottom right."""

    _align = "bottom_right"

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Return the mask of the last window_size keys of each query."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass(eq=False)
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal mask of window_size keys per query, aligned at the bottom right."""

    _window_size: int

    def __post_init__(self) -> None:
        self._check_window()


@dataclass(eq=False)
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Window of keys to the left and right of each query, aligned at the bottom right."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 0:
                raise ValueError(f"{name} must be >= 0, got {size}")

    def _band(self) -> tuple[int, int, str]:
        return self.window_left, self.window_right, "bottom_right"


@dataclass(eq=False)
class Blocks(AttentionBias):
    """Base class of masks for sequences in one dimension, without attention between them."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: Sequence[int] | None = None
    block_tables: Tensor | None = None
    page_size: int = 0

    def __post_init__(self) -> None:
        counts = len(self.q_seqinfo.seqlen_py), len(self.k_seqinfo.seqlen_py)
        if counts[0] != counts[1]:
            raise ValueError(
                f"kv_seqlen must have {counts[0]} elements (like q_seqlen), got {counts[1]}"
            )

    def to(self, device: Device) -> Any:
        """Return the mask with its tensors on a device."""
        moved, same = copy(self), self.q_seqinfo is self.k_seqinfo
        moved._padded_mask = None
        moved.q_seqinfo = self.q_seqinfo.to(device)
        moved.k_seqinfo = moved.q_seqinfo if same else self.k_seqinfo.to(device)
        moved.block_tables = None if self.block_tables is None else self.block_tables.to(device)
        return moved

    @property
    def padded_mask(self) -> Mask:
        """Mask of a batch of sequences with padded keys, always the same object."""
        if self._padded_mask is None:
            padding = masks.padding(self.k_seqinfo.seqlen)
            self._padded_mask = padding if self.mask is None else padding & self.mask
        return self._padded_mask

    def key_rows(self, total: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the used keys among `total` rows, and their cumulative lengths.

        Both are computed again after in-place changes to the tensors.
        """
        keys, table = self.k_seqinfo, self.block_tables

        def make() -> tuple[Tensor, Tensor]:
            starts, lengths = keys.seqstart[:-1], keys.seqlen
            if table is None:
                check_used("attn_bias", lengths, total, starts)
                return used_rows(starts, lengths), cumulative(lengths)
            num_pages = total // max(self.page_size, 1)
            rows = rows_of_pages(table, self.page_size, num_pages, "attn_bias", lengths, starts)
            return rows, cumulative(lengths)

        sources = keys.seqlen, keys.seqstart, *(() if table is None else (table,))
        return recall_on_tensor(keys.seqlen, ("xformers keys", total), sources, make)

    def check_rows(self, *rows: int) -> None:
        """Raise ValueError unless the numbers of queries and keys are those of the mask."""
        keys = rows[1] if self.block_tables is not None else self.k_seqinfo.seqstart_py[-1]
        expected = self.q_seqinfo.seqstart_py[-1], keys
        if rows != expected:
            raise ValueError(
                f"query and key must have {expected} rows in total (like attn_bias), got {rows}"
            )

    def _visible(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        self.check_rows(seqlen_q, seqlen_k)
        visible = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
        rows, ends = (x.tolist() for x in self.key_rows(seqlen_k))
        for b, length in enumerate(self.q_seqinfo.seqlen_py):
            start, keys = self.q_seqinfo.seqstart_py[b], rows[ends[b] : ends[b + 1]]
            visible[start : start + length, keys] = super()._visible(length, len(keys))
        return visible


class BlockDiagonalMask(Blocks):
    """Packed sequences."""

    @classmethod
    def from_seqlens(
        cls: type[T], q_seqlen: Lengths, kv_seqlen: Lengths | None = None, *, device: Device = None
    ) -> T:
        """Return the mask of sequences with these lengths; kv_seqlen defaults to q_seqlen."""
        queries = SeqLenInfo.of(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(queries, queries if same else SeqLenInfo.of(kv_seqlen or [], device=device))

    @classmethod
    def from_tensor_list(cls: type[T], tensors: Sequence[Tensor]) -> tuple[T, Tensor]:
        """Return the mask of tensors (batch, seqlen, ...), and the packed tensors."""
        return cls.from_tensor_lists_qkv(tensors, tensors)[:2]

    @classmethod
    def from_tensor_lists_qkv(
        cls: type[T], tensors_q: Any, tensors_k: Any, tensors_v: Any = None
    ) -> tuple[T, Tensor, Tensor, Tensor | None]:
        """Return the mask of lists of tensors (batch, seqlen, ...), and the packed tensors."""
        given = tensors_q, tensors_k, tensors_v
        lists = [None if xs is None else [x.flatten(0, 1) for x in xs] for xs in given]
        lengths = [[n for x in xs for n in [x.shape[1]] * len(x)] for xs in (tensors_q, tensors_k)]
        mask = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        mask._batch_sizes = [len(x) for x in tensors_q]
        query, key, value = (None if xs is None else torch.cat(xs)[None] for xs in lists)
        return mask, query, key, value  # type: ignore[return-value]

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """Split a packed tensor, (1, total_q, ...), into the tensors that were packed."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """Split a packed tensor, (1, total_k, ...), into the tensors that were packed."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split a packed tensor, (1, total, ...), into the tensors that were packed."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError(
                "split requires queries and keys of equal lengths: use split_queries or split_kv"
            )
        return self.split_queries(tensor)

    def _as(self, kind: type[T], window_size: int = 0) -> T:
        fields: Any = {"_window_size": window_size} if issubclass(kind, _Local) else {}
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, **fields)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Return the mask with a causal mask in each sequence."""
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Return the mask with a causal mask in each sequence, aligned at the bottom right."""
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Return the mask with a causal window of window_size keys in each sequence."""
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Return the mask with a causal window, aligned at the bottom right."""
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)


@dataclass(eq=False)
class _Local(Blocks):
    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_window()


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Packed sequences with a causal mask."""

    _align = "top_left"


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Packed sequences, none with more queries than keys, with a bottom-right causal mask."""

    _align = "bottom_right"

    def __post_init__(self) -> None:
        super().__post_init__()
        for counts in zip(self.q_seqinfo.seqlen_py, self.k_seqinfo.seqlen_py, strict=True):
            if counts[1] < counts[0]:
                raise ValueError(
                    "kv_seqlen of each sequence must be at least its q_seqlen, got kv_seqlen "
                    f"{counts[1]} and q_seqlen {counts[0]}"
                )


class BlockDiagonalCausalLocalAttentionMask(_Local, BlockDiagonalCausalMask):
    """Packed sequences with a causal window of window_size keys."""


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(
    _Local, BlockDiagonalCausalFromBottomRightMask
):
    """Packed sequences with a bottom-right causal window of window_size keys."""


class BlockDiagonalGappyKeysMask(Blocks):
    """Sequences whose keys have gaps between them."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_seqstarts: Lengths, kv_seqlen: Lengths, *, device: Device = None
    ) -> Any:
        """Return the mask of keys at kv_seqstarts, whose last element is the number of rows."""
        keys = SeqLenInfo.of(kv_seqlen, None, kv_seqstarts, device)
        return cls(SeqLenInfo.of(q_seqlen, device=device), keys)


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Keys with gaps between sequences, and a bottom-right causal mask."""

    _align = "bottom_right"


class BlockDiagonalPaddedKeysMask(Blocks):
    """Sequences whose keys are padded to equal lengths."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Lengths,
        kv_padding: int,
        kv_seqlen: Lengths,
        *,
        device: Device = None,
    ) -> Any:
        """Return the mask of sequences whose keys are kv_padding apart."""
        keys = SeqLenInfo.of(kv_seqlen, kv_padding, device=device)
        return cls(SeqLenInfo.of(q_seqlen, device=device), keys)


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys with a bottom-right causal mask."""

    _align = "bottom_right"


class _Paged(Blocks):
    @classmethod
    def _paged(
        cls, q_seqlen: Any, starts: Any, kv_seqlen: Any, tables: Tensor, page_size: int, device: Any
    ) -> Any:
        device = tables.device if device is None else device
        capacity = tables.shape[1] * page_size
        keys = SeqLenInfo.of(kv_seqlen, None, [*starts, capacity], device)
        ends = [start + n for start, n in zip(starts, keys.seqlen_py, strict=True)]
        if max(ends, default=0) > capacity:
            raise ValueError(
                f"each sequence's keys must end at or before position {capacity} (pages per "
                f"sequence times page_size), got ends {ends}"
            )
        queries = SeqLenInfo.of(q_seqlen, device=device)
        return cls(queries, keys, None, tables, page_size)


class PagedBlockDiagonalPaddedKeysMask(_Paged):
    """Sequences whose keys are in pages, with shape (1, num_pages * page_size, ...)."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Lengths,
        kv_seqlen: Lengths,
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Any:
        """Return the mask of sequences with these lengths in block_tables, (batch, max_pages)."""
        starts = [0] * len(block_tables)
        return cls._paged(q_seqlen, starts, kv_seqlen, block_tables, page_size, device)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Keys in pages with a bottom-right causal mask."""

    _align = "bottom_right"


class PagedBlockDiagonalGappyKeysMask(_Paged):
    """Sequences whose keys are in pages and start at any position within them."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Lengths,
        kv_seqstarts: Lengths,
        kv_seqlen: Lengths,
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Any:
        """Return the mask of keys that start at kv_seqstarts, (batch,), within their pages."""
        return cls._paged(q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, device)


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Keys in pages from any position on, with a bottom-right causal mask."""

    _align = "bottom_right"
