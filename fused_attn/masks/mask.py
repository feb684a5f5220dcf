"""Attention masks that users compose.

A `Mask` is a set of conditions combined with ``&``: a position is visible where all of them say
so; float masks and ALiBi add to the scores. What kernels see of it is made in spec.py; no
other file asks what a mask means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fused_attn.base.torch_state import host_readable
from fused_attn.masks.memo import Memo, recall

# Larger than any sequence, and small enough that sums of a few stay inside int32, the type in
# which kernels compare positions.
UNLIMITED = 1 << 29
ALIGNMENTS = ("top_left", "bottom_right")


@dataclass(frozen=True)
class _Band:
    """Visible where -left <= j - (i + offset) <= right; the offset comes from `align`."""

    left: int
    right: int
    align: str


@dataclass(frozen=True)
class _Padding:
    key_lengths: Tensor
    query_lengths: Tensor | None
    side: str


@dataclass(frozen=True)
class _Documents:
    query_ids: Tensor
    key_ids: Tensor


@dataclass(frozen=True)
class _Alibi:
    slopes: Tensor
    align: str


@dataclass(frozen=True, eq=False)
class Mask:
    """A composition of conditions on (batch, num_heads, seqlen_q, seqlen_k); combine with ``&``.

    Make one with the functions of this module. A Mask is immutable and keeps what kernels derive
    from it (tile summaries), so pass the same object to every layer that shares it. In-place
    changes of its tensors by torch operations are noticed; through numpy or `.data` they are not
    (see `memo.recall`).
    """

    bands: tuple[_Band, ...] = ()
    paddings: tuple[_Padding, ...] = ()
    prefixes: tuple[Tensor, ...] = ()
    document_pairs: tuple[_Documents, ...] = ()
    dense_masks: tuple[Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()
    slopes: tuple[_Alibi, ...] = ()
    memo: Memo = field(default_factory=dict, repr=False, compare=False)
    _draw: ClassVar[Callable[..., Any]]  # set by picture.py, which imports this file
    _tensors: ClassVar[list[Tensor] | None] = None  # of an object, once they were asked for

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, Tensor):
            made = "bias" if other.is_floating_point() else "dense"
            raise TypeError(
                f"a Mask and a {_describe(other)} cannot be combined as they are: use "
                f"mask & masks.{made}(tensor)"
            )
        if not isinstance(other, Mask):
            return NotImplemented
        pairs = zip(self.conditions(), other.conditions(), strict=True)
        return Mask(*(own + others for own, others in pairs))

    __rand__ = __and__  # of a tensor, for the message

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles leave out the memo: versions of other tensors mean nothing."""
        return Mask, self.conditions()

    def to(self, device: torch.device | str) -> Mask:
        """The same conditions with every tensor on a device.

        Args:
            device: where query, key and value are.

        Returns:
            This mask if all of its tensors are there already; otherwise another one, which keeps
            nothing of what kernels derived from this one.

        Example:
            >>> query = torch.randn(2, 8, 128, 64)
            >>> mask = fused_attn.masks.causal() & fused_attn.masks.padding([128, 100])
            >>> mask = mask.to(query.device)
        """
        return self.mapped(lambda tensor: tensor.to(device))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Mask:
        """The same conditions of other tensors; this mask where all of them are the same."""
        mapped = Mask(*_mapped(self.conditions(), function))
        pairs = zip(self.tensors(), mapped.tensors(), strict=True)
        return self if all(one is other for one, other in pairs) else mapped

    def plot(
        self,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        sequence: int = 0,
        head: int = 0,
        tile: tuple[int, int] = (64, 64),
        axes: Any = None,
    ) -> Any:
        """A picture of one head of one sequence, by matplotlib: what is visible, and which tiles
        kernels skip, work on in part, and work on whole.

        Args:
            seqlen_q, seqlen_k: queries and keys; None: as many keys as queries.
            sequence, head: which ones of those that the mask has something of its own for.
            tile: queries and keys of a tile. Kernels' differ: on a CPU with AMX 64 x 64.
            axes: matplotlib's Axes that are drawn on; None makes some.

        Returns:
            The Axes; `.figure.savefig(path)` writes the picture. What is visible is the darker,
            the more a bias or ALiBi adds to its score.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the mask is not one of these sizes.

        Example:
            >>> axes = fused_attn.masks.sliding_window(128).plot(512)
            >>> axes.figure.savefig("window.png")  # doctest: +SKIP
        """
        keys = seqlen_q if seqlen_k is None else seqlen_k
        return self._draw(seqlen_q, keys, sequence, head, tile, axes)

    @property
    def is_relative(self) -> bool:
        """Whether it is made of bands and ALiBi alone, none of which depends on a sequence's end:
        then it is the same for sequences at other places of a batch."""
        others = replace(self, bands=(), slopes=()).conditions()
        aligns = [band.align for band in self.bands] + [alibi.align for alibi in self.slopes]
        return set(aligns) <= {"top_left"} and not any(others)

    def conditions(self) -> tuple[Any, ...]:
        """The fields that users compose, without the memo."""
        return tuple([getattr(self, name) for name in _CONDITIONS])

    def tensors(self) -> list[Tensor]:
        """Every tensor of the conditions."""
        if self._tensors is not None:
            return self._tensors
        tensors = _tensors_of(self.conditions())
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "_tensors", tensors)  # they stay the same
        return tensors


_CONDITIONS = tuple(f.name for f in fields(Mask) if f.name != "memo")


def causal(align: str = "top_left") -> Mask:
    """Look-ahead mask: query i sees keys up to i (Vaswani et al. 2017, section 3.2.3).

    Args:
        align: "top_left" compares i and j as they are; "bottom_right" lines the last query up
            with the last key of its sequence (offset len_k - len_q), as decoding with a cache
            needs.
    """
    return sliding_window(-1, 0, align=align)


def sliding_window(left: int, right: int = 0, align: str = "top_left") -> Mask:
    """Visible where i + offset - left <= j <= i + offset + right.

    Args:
        left: keys before the diagonal that are visible; -1 is unlimited.
        right: keys after the diagonal that are visible; -1 is unlimited.
        align: "top_left" (offset 0) or "bottom_right" (offset len_k - len_q of the sequence).

    Source: Beltagy et al. 2020, "Longformer", section 3.1.
    """
    for name, value in (("left", left), ("right", right)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < -1:
            raise ValueError(f"{name} must be >= 0, or -1 for unlimited, got {value}")
    _check_align(align)
    left = UNLIMITED if left == -1 else min(left, UNLIMITED)
    right = UNLIMITED if right == -1 else min(right, UNLIMITED)
    return Mask(bands=(_Band(left, right, align),))


def padding(
    key_lengths: Tensor | Sequence[int],
    query_lengths: Tensor | Sequence[int] | None = None,
    side: str = "right",
) -> Mask:
    """Sequences shorter than the tensor: only real keys are visible, only real queries see.

    Args:
        key_lengths: (batch,) integers, real keys of each sequence.
        query_lengths: (batch,) integers, real queries; None means that all are real. The rows of
            the others are 0.
        side: where the padding is, "right" (real tokens first) or "left".

    Example:
        >>> tokens = torch.tensor([[5, 8, 2, 0], [7, 2, 0, 0]])  # 0 is <pad>
        >>> lengths = (tokens != 0).sum(1)
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.padding(lengths)
    """
    if side not in ("right", "left"):
        raise ValueError(f'side must be "right" or "left", got {side!r}')
    keys = _lengths("key_lengths", key_lengths)
    queries = None if query_lengths is None else _lengths("query_lengths", query_lengths)
    if queries is not None and queries.shape != keys.shape:
        raise ValueError(
            f"query_lengths must have shape {tuple(keys.shape)} (as key_lengths), "
            f"got {tuple(queries.shape)}"
        )
    return Mask(paddings=(_Padding(keys, queries, side),))


def prefix_lm(prefix_lengths: Tensor | Sequence[int]) -> Mask:
    """Prefix language model: every query sees the prefix, and beyond it keys up to its own.

    Args:
        prefix_lengths: (batch,) integers.

    Source: Raffel et al. 2020, "T5", section 3.2.1.
    """
    return Mask(prefixes=(_lengths("prefix_lengths", prefix_lengths),))


def documents(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Several documents packed into one sequence: equal ids see each other.

    Args:
        query_ids: (batch, seqlen_q) or (seqlen_q,) integers.
        key_ids: (batch, seqlen_k) or (seqlen_k,) integers; None takes query_ids.

    Example:
        >>> ids = torch.tensor([0, 0, 0, 1, 1, 2])  # three documents of 3, 2 and 1 tokens
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.documents(ids)
    """
    query = _ids("query_ids", query_ids)
    key = query if key_ids is None else _ids("key_ids", key_ids)
    return Mask(document_pairs=(_Documents(query, key),))


def alibi(slopes: Tensor, align: str = "top_left") -> Mask:
    """Attention with linear biases: adds -slope * |i + offset - j| to the scores.

    Args:
        slopes: float (num_heads,) or (batch, num_heads). Not differentiated.
        align: offset as in `sliding_window`.

    Example:
        >>> slopes = 2.0 ** -torch.arange(1, 9)  # of 8 heads
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.alibi(slopes)

    Source: Press et al. 2022, "Train Short, Test Long", section 3.
    """
    _check_align(align)
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        raise TypeError(f"slopes must be a float tensor, got {_describe(slopes)}")
    if slopes.requires_grad:
        raise ValueError("slopes must not require grad: use masks.bias to learn a bias")
    if slopes.dim() not in (1, 2):
        raise ValueError(
            f"slopes must have shape (num_heads,) or (batch, num_heads), got {tuple(slopes.shape)}"
        )
    return Mask(slopes=(_Alibi(slopes, align),))


def dense(mask: Tensor) -> Mask:
    """An arbitrary mask: bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k).

    Args:
        mask: True = attend. One that does not depend on the query, such as (batch, 1, 1,
            seqlen_k), is stored as a key mask and costs O(seqlen_k).
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be a bool tensor (True = attend), got {_describe(mask)}"
            f"{_as_bool(mask) or '; a float mask goes through masks.bias'}"
        )
    return Mask(dense_masks=(mask,))


def bias(mask: Tensor) -> Mask:
    """A float tensor added to the scaled (and soft-capped) scores; -inf masks.

    Args:
        mask: broadcastable to (batch, num_heads, seqlen_q, seqlen_k); its gradient is computed in
            its own shape.
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        raise TypeError(
            f"mask must be a float tensor, got {_describe(mask)}; a bool mask goes through "
            "masks.dense"
        )
    return Mask(biases=(mask,))


def as_mask(attn_mask: Tensor | Mask | None, is_causal: bool = False) -> Mask | None:
    """The Mask that an `attn_mask` argument stands for; None if everything is visible.

    Args:
        attn_mask: a Mask, a bool tensor (True = attend), a float tensor, or None.
        is_causal: combined with `causal()`.
    """
    if attn_mask is None:
        mask = None
    elif isinstance(attn_mask, Mask):
        mask = attn_mask
    elif not isinstance(attn_mask, Tensor):
        raise TypeError(
            f"attn_mask must be a bool tensor, a float tensor or a Mask, got {_describe(attn_mask)}"
        )
    elif attn_mask.is_nested or attn_mask.layout != torch.strided:
        raise TypeError("attn_mask must be a dense tensor, not nested or sparse")
    elif attn_mask.dtype == torch.bool:
        mask = dense(attn_mask)
    elif attn_mask.is_floating_point():
        mask = bias(attn_mask)
    else:
        raise TypeError(
            f"attn_mask must be bool or float, got {attn_mask.dtype}{_as_bool(attn_mask)}"
        )
    if not is_causal:
        return mask
    if mask is None:
        return causal()
    return recall(mask.memo, "causal", mask.tensors(), _CPU, lambda: mask & causal())


_CPU = torch.device("cpu")  # nothing is computed of the tensors


def _tensors_of(condition: Any) -> list[Tensor]:
    """The tensors of a condition, or of tuples of them."""
    if isinstance(condition, Tensor):
        return [condition]
    if is_dataclass(condition):
        condition = tuple([getattr(condition, f.name) for f in fields(condition)])
    if not isinstance(condition, tuple):
        return []
    return [tensor for part in condition for tensor in _tensors_of(part)]


def _mapped(condition: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A condition, or tuples of them, of other tensors."""
    if isinstance(condition, Tensor):
        return function(condition)
    if isinstance(condition, tuple):
        return tuple([_mapped(part, function) for part in condition])
    if not is_dataclass(condition):
        return condition
    parts = {f.name: _mapped(getattr(condition, f.name), function) for f in fields(condition)}
    return cast(Any, type(condition))(**parts)


def _lengths(name: str, lengths: Tensor | Sequence[int]) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, device="cpu")
        if lengths.numel() == 0:
            lengths = lengths.long()
    if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
        raise TypeError(f"{name} must be integers, got {lengths.dtype}")
    if lengths.dim() != 1:
        raise ValueError(f"{name} must have shape (batch,), got {tuple(lengths.shape)}")
    if host_readable(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"{name} must be >= 0, got {int(lengths.min())}")
    return lengths


def _ids(name: str, ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got {_describe(ids)}")
    if ids.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape (batch, seqlen), got {tuple(ids.shape)}")
    return ids


def _check_align(align: str) -> None:
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS}, got {align!r}")


def _as_bool(mask: object) -> str:
    """What to do with an integer mask; nothing for all else."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        return ""
    return ": where 1 is to attend and 0 is not, pass its .bool()"


def _describe(value: object) -> str:
    return str(value.dtype) + " tensor" if isinstance(value, Tensor) else type(value).__name__
