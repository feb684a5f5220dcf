"""Composable attention masks.

A `Mask` is a set of conditions combined with ``&``. A position (query i, key j) is visible if all
conditions allow it. Float masks and ALiBi are added to the scores. spec.py converts a Mask to a
MaskSpec, the form for kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import FunctionType, MethodType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fused_attn.base.torch_state import dtype_name, has_tangent, host_readable, is_compiling
from fused_attn.masks.memo import Memo

# Exceeds every supported sequence length. Kernels compute positions in int32, which a sum of up to
# three values of this size does not overflow.
UNLIMITED = 1 << 29
ALIGNMENTS = ("top_left", "bottom_right")


@dataclass(frozen=True)
class _Band:
    """Diagonal band: key j is visible to query i if -left <= j - (i + offset) <= right.

    The offset is 0 for "top_left" and len_k - len_q of the sequence for "bottom_right". `offset`,
    int64 (batch,), replaces it.
    """

    left: int
    right: int
    align: str
    offset: Tensor | None = None


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


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """An attention mask over (batch, num_heads, seqlen_q, seqlen_k), composed with ``&``.

    Create a Mask with the functions of this module. It is immutable and caches the values that are
    derived from it (the MaskSpec, tile summaries), so pass the same object to every layer that uses
    it. In-place changes to its tensors by torch operations are detected. Changes through numpy or
    `.data` are not (see `memo.recall`).
    """

    bands: tuple[_Band, ...] = ()
    paddings: tuple[_Padding, ...] = ()
    prefixes: tuple[Tensor, ...] = ()
    document_pairs: tuple[_Documents, ...] = ()
    dense_masks: tuple[Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()
    slopes: tuple[_Alibi, ...] = ()
    intervals: tuple[Tensor, ...] = ()  # as in MaskSpec
    bits: tuple[Tensor, ...] = ()  # as in MaskSpec
    mask_mods: tuple[Any, ...] = ()  # see mask_mod.py
    memo: Memo = field(default_factory=dict, repr=False, compare=False)
    # Set by picture.py and materialize.py, to avoid circular imports.
    _draw: ClassVar[Callable[..., Any]]
    _visible_rows: ClassVar[Callable[..., Tensor]]
    _tensors: ClassVar[list[Tensor] | None] = None  # cached per instance by tensors()

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if f.repr]
        return f"Mask({', '.join(f'{name}={_short(value)}' for name, value in given if value)})"

    def __and__(self, other: Mask) -> Mask:
        if isinstance(other, Tensor):
            made = "bias" if other.is_floating_point() else "dense"
            raise TypeError(
                f"a Mask and a {describe(other)} cannot be combined directly: use "
                f"mask & masks.{made}(tensor)"
            )
        if not isinstance(other, Mask):
            return NotImplemented
        pairs = zip(self.conditions(), other.conditions(), strict=True)
        return Mask(*(own + others for own, others in pairs))

    __rand__ = __and__  # tensor & mask raises the same TypeError as mask & tensor

    def __or__(self, other: Mask) -> Mask:
        """Return a mask in which a position is visible if it is visible in either mask.

        The union is evaluated and recognized like the function of `from_mask_mod`.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        if any(mask.biases or mask.slopes for mask in (self, other)):
            raise ValueError(
                "masks with a bias or ALiBi cannot be combined with |: use (a | b) & bias"
            )
        return Mask(mask_mods=((self, other),))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the memo, because its tensor versions are invalid for a copy."""
        return Mask, self.conditions()

    def to(self, device: torch.device | str) -> Mask:
        """Return this mask with all tensors moved to a device.

        Args:
            device: the device of query, key and value.

        Returns:
            This mask if all tensors are already on the device; otherwise a new mask with an empty
            cache.

        Example:
            >>> query = torch.randn(2, 8, 128, 64)
            >>> mask = fused_attn.masks.causal() & fused_attn.masks.padding([128, 100])
            >>> mask = mask.to(query.device)
        """
        return self.mapped(lambda tensor: tensor.to(device))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Mask:
        """Return a mask with each tensor replaced by function(tensor).

        If function returns every tensor unchanged, this mask is returned, with its cache.
        """
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
        """Plot the mask of one sequence and head with matplotlib.

        The plot shows the visible positions, and the skipped, partial and full tiles. Visible
        positions with a higher bias (including ALiBi) are darker.

        Args:
            seqlen_q, seqlen_k: number of queries and keys. If seqlen_k is None, it equals seqlen_q.
            sequence, head: indices of the sequence and head to plot.
            tile: number of queries and keys per tile. The size depends on the kernel. On a CPU with
                AMX it is 64 x 64.
            axes: matplotlib Axes to draw on; None creates a figure.

        Returns:
            The matplotlib Axes. Save the plot with `.figure.savefig(path)`.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the mask does not fit these sizes.

        Example:
            >>> axes = fused_attn.masks.sliding_window(128).plot(512)
            >>> axes.figure.savefig("window.png")  # doctest: +SKIP
        """
        keys = seqlen_q if seqlen_k is None else seqlen_k
        return self._draw(seqlen_q, keys, sequence, head, tile, axes)

    @property
    def is_relative(self) -> bool:
        """True if the mask consists only of top-left bands and top-left ALiBi.

        It then depends on j - i only, not on sequence lengths, so it is the same for packed
        sequences.
        """
        others = replace(self, bands=(), slopes=()).conditions()
        aligns = [band.align for band in self.bands] + [alibi.align for alibi in self.slopes]
        own = any(band.offset is not None for band in self.bands)
        return set(aligns) <= {"top_left"} and not own and not any(others)

    def conditions(self) -> tuple[Any, ...]:
        """Return the values of all fields except the memo."""
        return tuple([getattr(self, name) for name in _CONDITIONS])

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the conditions, in field order."""
        if self._tensors is not None:
            return self._tensors
        tensors = _tensors_of(self.conditions())
        if not is_compiling():
            object.__setattr__(self, "_tensors", tensors)  # the dataclass is frozen
        return tensors


_CONDITIONS = tuple(f.name for f in fields(Mask) if f.name != "memo")


def causal(align: str = "top_left") -> Mask:
    """Create a causal mask: query i attends to keys j <= i.

    Args:
        align: "top_left" compares i and j directly. "bottom_right" aligns the last query with the
            last key of its sequence (offset len_k - len_q); use it for decoding with a KV cache.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.
    """
    return sliding_window(-1, 0, align=align)


def sliding_window(left: int, right: int = 0, align: str = "top_left") -> Mask:
    """Create a sliding-window mask: query i attends to the keys around position i.

    Key j is visible if i + offset - left <= j <= i + offset + right.

    Args:
        left: number of visible keys before the diagonal; -1 means unlimited.
        right: number of visible keys after the diagonal; -1 means unlimited.
        align: "top_left" (offset 0) or "bottom_right" (offset len_k - len_q for each sequence).

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


def diagonals(left: int, right: int, offset: Tensor | None = None) -> Mask:
    """Return the mask -left <= j - i - offset <= right. left may be negative.

    Args:
        offset: int64 (batch,), for a mask that also has padding, which does not change the offset.
            None means 0.
    """
    if left >= UNLIMITED and right >= UNLIMITED:
        return Mask()
    return Mask(bands=(_Band(left, right, "top_left", offset),))


def padding(
    key_lengths: Tensor | Sequence[int],
    query_lengths: Tensor | Sequence[int] | None = None,
    side: str = "right",
) -> Mask:
    """Create a padding mask, for a batch of sequences with different lengths.

    Args:
        key_lengths: (batch,) integers, number of keys in each sequence, without padding.
        query_lengths: (batch,) integers, number of queries in each sequence, without padding; None
            means no padding queries. The output of padding queries is 0.
        side: side of the padding: "right" (tokens first) or "left" (padding first).

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
            f"query_lengths must have shape {tuple(keys.shape)} (like key_lengths), "
            f"got {tuple(queries.shape)}"
        )
    return Mask(paddings=(_Padding(keys, queries, side),))


def prefix_lm(prefix_lengths: Tensor | Sequence[int]) -> Mask:
    """Create a prefix-LM mask: a causal mask in which the prefix is visible to every query.

    Args:
        prefix_lengths: (batch,) integers, number of keys in the prefix of each sequence.

    Source: Raffel et al. 2020, "T5", section 3.2.1.
    """
    return Mask(prefixes=(_lengths("prefix_lengths", prefix_lengths),))


def documents(
    query_ids: Tensor | Sequence[Any], key_ids: Tensor | Sequence[Any] | None = None
) -> Mask:
    """Create a block-diagonal mask for documents packed into one sequence.

    A query attends to the keys with the same document id.

    Args:
        query_ids: (batch, seqlen_q) or (seqlen_q,) integers. A list, or a tensor on the CPU, is
            copied to the device of query, which fails while a CUDA graph is captured.
        key_ids: (batch, seqlen_k) or (seqlen_k,) integers; None means query_ids.

    Example:
        >>> ids = torch.tensor([0, 0, 0, 1, 1, 2])  # three documents of 3, 2 and 1 tokens
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.documents(ids)
    """
    shapes = "(seqlen,)", "(batch, seqlen)"
    query = _numbers("query_ids", query_ids, "integers", *shapes)
    key = query if key_ids is None else _numbers("key_ids", key_ids, "integers", *shapes)
    return Mask(document_pairs=(_Documents(query, key),))


def alibi(slopes: Tensor | Sequence[Any], align: str = "top_left") -> Mask:
    """Create an ALiBi bias (attention with linear biases): add -slope * |i + offset - j| to scores.

    Args:
        slopes: float (num_heads,) or (batch, num_heads), rounded to float32. Gradients are not
            supported.
        align: sets the offset, as in `sliding_window`.

    Example:
        >>> slopes = 2.0 ** -torch.arange(1, 9)  # of 8 heads
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.alibi(slopes)

    Source: Press et al. 2022, "Train Short, Test Long", section 3.
    """
    _check_align(align)
    slopes = _numbers("slopes", slopes, "floats", "(num_heads,)", "(batch, num_heads)")
    if slopes.requires_grad or (not is_compiling() and has_tangent(slopes)):
        raise ValueError("slopes must not require grad: use masks.bias to learn a bias")
    return Mask(slopes=(_Alibi(slopes, align),))


def _tensors_of(condition: Any) -> list[Tensor]:
    """Return all tensors in a condition: in nested tuples, or read by its function."""
    if isinstance(condition, Tensor):
        return [condition]
    if callable(condition):
        # Under torch.compile, the graph itself evaluates the function.
        return [] if is_compiling() else _tensors_read(condition, set())
    if is_dataclass(condition):
        condition = tuple([getattr(condition, f.name) for f in fields(condition)])
    if not isinstance(condition, tuple):
        return []
    return [tensor for part in condition for tensor in _tensors_of(part)]


def _tensors_read(value: Any, seen: set[int]) -> list[Tensor]:
    """Return the tensors in a value; for a function, in its closure, globals and defaults."""
    if isinstance(value, Tensor):
        return [value]
    if id(value) in seen:
        return []
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        parts = [value.__globals__[n] for n in names if n in value.__globals__]
        parts = [p for p in parts if isinstance(p, (Tensor, FunctionType))]
        parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                parts.append(cell.cell_contents)
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, (tuple, list, dict)):
        parts = list(value.values() if isinstance(value, dict) else value)
    if callable(value) and not isinstance(value, type):
        parts += getattr(value, "__dict__", {}).values()
    return [tensor for part in parts for tensor in _tensors_read(part, seen)]


def _mapped(condition: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a condition, or nested tuples of conditions, with function applied to each tensor."""
    if isinstance(condition, Tensor):
        return function(condition)
    if isinstance(condition, tuple):
        return tuple([_mapped(part, function) for part in condition])
    if isinstance(condition, Mask):
        return condition.mapped(function)
    if not is_dataclass(condition):
        return condition
    parts = {f.name: _mapped(getattr(condition, f.name), function) for f in fields(condition)}
    return cast(Any, type(condition))(**parts)


def _lengths(name: str, lengths: Tensor | Sequence[int]) -> Tensor:
    lengths = _numbers(name, lengths, "integers", "(batch,)")
    if host_readable(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"{name} must be >= 0, got {int(lengths.min())}")
    return lengths


def _numbers(name: str, values: Any, kind: str, *shapes: str) -> Tensor:
    """Convert values to a tensor; raise an error unless it has the kind and one of the shapes.

    Args:
        kind: "integers" or "floats".
    """
    tensor = values
    if not isinstance(values, Tensor):
        try:
            tensor = torch.as_tensor(values, device="cpu")
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(f"{name} must be {kind}, got {describe(values)}") from None
        tensor = tensor.long() if tensor.numel() == 0 and kind == "integers" else tensor
    is_float = tensor.is_floating_point()
    if is_float != (kind == "floats") or tensor.dtype == torch.bool or tensor.is_complex():
        raise TypeError(f"{name} must be {kind}, got {tensor.dtype}")
    if tensor.dim() not in [len(shape.split(", ")) for shape in shapes]:
        raise ValueError(f"{name} must have shape {' or '.join(shapes)}, got {tuple(tensor.shape)}")
    return tensor


def _check_align(align: str) -> None:
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS}, got {align!r}")


def _short(value: Any) -> str:
    """Describe a condition without the values of its tensors."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_short, value))}]"
    if not is_dataclass(value) or isinstance(value, Mask):
        return repr(value)
    parts = [f"{f.name}={_short(getattr(value, f.name))}" for f in fields(value)]
    return f"{type(value).__name__.lstrip('_')}({', '.join(parts)})"


def describe(value: object) -> str:
    return str(value.dtype) + " tensor" if isinstance(value, Tensor) else type(value).__name__
