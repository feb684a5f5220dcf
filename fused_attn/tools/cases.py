"""Attention shapes and masks by their command-line names, for `bench`, tests and benchmarks."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.call.packed import cumulative
from fused_attn.masks import Mask
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask

DTYPES = ("float32", "bfloat16", "float16")
MAX_SCORES = 2**22  # eager attention materializes the scores of a checked call, also in float64


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention call, as in `fused_attn.scaled_dot_product_attention`.

    Example:
        >>> Shape.parse("2,8/2,512,512,64")  # 8 heads of queries, 2 of keys and values
    """

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Parse "batch,heads,seqlen_q,seqlen_k,head_dim"; heads may be "heads/heads_kv".

        Raises:
            ValueError: text does not have this form.
        """
        try:
            batch, heads, *rest = text.split(",")
            num_heads, _, num_heads_kv = heads.partition("/")
            seqlen_q, seqlen_k, head_dim = map(int, rest)
            shape = Shape(
                int(batch), int(num_heads), int(num_heads_kv or num_heads), seqlen_q, seqlen_k,
                head_dim,
            )  # fmt: skip
        except ValueError:
            raise ValueError(
                "shape must be batch,heads,seqlen_q,seqlen_k,head_dim, such as 2,8,512,512,64 or "
                f"(with fewer key heads) 2,8/2,512,512,64, got {text!r}"
            ) from None
        if min(vars(shape).values()) < 1 or shape.num_heads % shape.num_heads_kv:
            raise ValueError(
                f"shape must have positive sizes, and heads divisible by heads_kv, got {text!r}"
            )
        return shape

    def __str__(self) -> str:
        heads = str(self.num_heads)
        if self.num_heads != self.num_heads_kv:
            heads += f"/{self.num_heads_kv}"
        return f"{self.batch},{heads},{self.seqlen_q},{self.seqlen_k},{self.head_dim}"

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape of the scores: (batch, num_heads, seqlen_q, seqlen_k)."""
        return self.batch, self.num_heads, self.seqlen_q, self.seqlen_k

    def score_flops(self) -> int:
        """Return the FLOPs of one matmul of all queries with all keys, without a mask."""
        return 2 * math.prod(self.scores) * self.head_dim

    def key_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the key and value tensors together, in bytes."""
        return 2 * self.batch * self.num_heads_kv * self.seqlen_k * self.head_dim * dtype.itemsize

    def operands(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        layout: str = "contiguous",
    ) -> dict[str, Tensor]:
        """Return random query, key and value, each (batch, heads, seqlen, head_dim), by name.

        Equal seeds give equal tensors on the same device and in the same dtype.

        Args:
            layout: "contiguous", or "transposed" for views of (batch, seqlen, heads, head_dim)
                tensors, as models pass them.
        """
        generator = torch.Generator(device).manual_seed(seed)
        # On a GPU, draw in dtype: a float32 copy of a long 16-bit KV cache needs twice its memory.
        drawn = dtype if generator.device.type == "cuda" else torch.float32
        sizes = {"query": (self.num_heads, self.seqlen_q)}
        sizes |= dict.fromkeys(("key", "value"), (self.num_heads_kv, self.seqlen_k))
        operands = {
            name: torch.randn(
                self.batch, *size, self.head_dim, generator=generator, dtype=drawn, device=device
            ).to(dtype)
            for name, size in sizes.items()
        }
        if layout == "contiguous":
            return operands
        return {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in operands.items()}

    def reduced(self, batch: int | None = None) -> Shape:
        """Return the shape with fewer sequences and heads, to limit its scores to MAX_SCORES.

        At least one sequence and one KV head remain.

        Args:
            batch: number of sequences to use even if their scores exceed MAX_SCORES.
        """
        group = self.num_heads // self.num_heads_kv
        fitting = MAX_SCORES // (group * self.seqlen_q * self.seqlen_k)
        if batch is None:
            batch = min(self.batch, max(1, fitting))
        heads_kv = min(self.num_heads_kv, max(1, fitting // batch))
        return replace(self, batch=batch, num_heads=heads_kv * group, num_heads_kv=heads_kv)

    def part_of(self, whole: Shape) -> Callable[[Tensor], Tensor]:
        """Return a function that slices tensors of `whole` to the sequences and heads of self.

        Tensors have shape ([batch,] heads, rows, columns). A heads dimension of size 1 is kept.
        """

        def part(tensor: Tensor) -> Tensor:
            heads = max(1, self.num_heads_kv * tensor.shape[-3] // whole.num_heads_kv)
            tensor = tensor[..., :heads, :, :]
            return tensor[: self.batch] if tensor.dim() == 4 else tensor

        return part


def sequence_lengths(batch: int, longest: int) -> Tensor:
    """Return `batch` lengths, evenly spaced from a quarter of `longest` to `longest`."""
    return (longest * torch.linspace(0.25, 1.0, batch)).ceil().long()


def _documents(shape: Shape, size: int) -> Mask:
    return masks.documents(
        torch.arange(shape.seqlen_q) // size, torch.arange(shape.seqlen_k) // size
    )


def _ragged_documents(shape: Shape, size: int) -> Mask:
    longest = max(shape.seqlen_q, shape.seqlen_k)
    starts = torch.randperm(longest, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(longest, dtype=torch.long)
    ids[starts[: longest // size]] = 1
    ids = ids.cumsum(0)
    return masks.documents(ids[: shape.seqlen_q], ids[: shape.seqlen_k])


def _alibi(shape: Shape, _: int) -> Mask:
    return masks.alibi(2.0 ** (-8.0 / shape.num_heads * torch.arange(1.0, shape.num_heads + 1)))


def _blocks(shape: Shape, size: int, shift: int = 0) -> Mask:
    rows = (torch.arange(shape.seqlen_q) + shift) // size
    columns = (torch.arange(shape.seqlen_k) + shift) // size
    return masks.dense(rows[:, None] == columns)


def _random(shape: Shape, _: int) -> Mask:
    generator = torch.Generator().manual_seed(0)
    return masks.dense(torch.rand(shape.seqlen_q, shape.seqlen_k, generator=generator) < 0.5)


@dataclass(frozen=True)
class MaskKind:
    """Named kind of mask: description, constructor and default SIZE (0 if it has no size)."""

    what: str
    make: Callable[[Shape, int], Mask]
    size: int = 0


MASKS = {
    "causal": MaskKind("query i attends to keys 0 to i", lambda *_: masks.causal()),
    "causal_bottom_right": MaskKind(
        "causal; the last query attends to all keys", lambda *_: masks.causal("bottom_right")
    ),
    "window": MaskKind(
        "causal window of 256 keys, or of SIZE keys",
        lambda _, size: masks.sliding_window(size - 1),
        size=256,
    ),
    "padding": MaskKind("lengths from a quarter of seqlen_k to seqlen_k",
        lambda shape, _: masks.padding(sequence_lengths(shape.batch, shape.seqlen_k)),
    ),
    "prefix": MaskKind("causal after a prefix of a quarter of the keys",
        lambda shape, _: masks.prefix_lm([shape.seqlen_k // 4] * shape.batch),
    ),
    "documents": MaskKind("documents of 256 tokens, or of SIZE tokens", _documents, size=256),
    "ragged_documents": MaskKind(
        "documents of different lengths, 256 or SIZE on average", _ragged_documents, size=256
    ),
    "alibi": MaskKind("a linear bias with a different slope for each head", _alibi),
    "blocks": MaskKind("a bool tensor with diagonal blocks of 256 or SIZE keys", _blocks, size=256),
    "ragged_blocks": MaskKind(
        "like blocks, with edges that are not aligned to tiles",
        lambda shape, size: _blocks(shape, size, shift=37),
        size=256,
    ),
    "random": MaskKind("a random bool tensor, half of it True", _random),
}  # fmt: skip


def make_mask(text: str, shape: Shape, device: torch.device | str = "cpu") -> Mask | None:
    """Return the mask for a shape that `text` names: "none", or names of `MASKS` joined by "+".

    Raises:
        ValueError: `text` contains an unknown name or an invalid size.

    Example:
        >>> make_mask("causal+window:128", shape)
    """
    parts = []
    for part in [] if text == "none" else text.split("+"):
        name, _, size = part.partition(":")
        kind = MASKS.get(name)
        if kind is None or (size and not (kind.size and size.isdecimal() and int(size))):
            sized = [f"{name}[:SIZE]" if kind.size else name for name, kind in MASKS.items()]
            raise ValueError(
                f"mask must be none, or one or more of {', '.join(sized)} joined by +, got {text!r}"
            )
        parts.append(kind.make(shape, int(size or kind.size)).to(device))
    return combined(*parts)


def combined(*parts: Mask | None) -> Mask | None:
    """Return the conjunction of masks; None stands for no mask."""
    given = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, given) if given else None


def tensors_of(
    mask: Mask | None, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.float64
) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask as two tensors: visible keys (None if all are) and score bias (None if none).

    Args:
        dtype: dtype of the bias.

    Returns:
        Tensors that broadcast to (batch, num_heads, seqlen_q, seqlen_k).
    """
    device = torch.empty(0, device=device).device  # with an index, as the tensors have it
    spec = spec_of_mask(mask, *shape.scores, device)
    visible, bias = materialize(spec, *shape.scores, device, dtype)
    if visible is not None:
        first = visible[:, :, :1]
        if torch.equal(first.expand_as(visible), visible):  # the mask does not depend on the query
            visible = first
    return visible, bias


def as_one_tensor(visible: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask in the form that torch accepts: one bool tensor, or a float one with -inf."""
    if bias is None:
        return visible
    mask = bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    return mask.to(dtype)


def as_dense_mask(visible: Tensor | None, bias: Tensor | None) -> Mask | None:
    """Return a dense Mask that combines visible keys and a score bias; None if both are None."""
    return combined(
        None if visible is None else masks.dense(visible),
        None if bias is None else masks.bias(bias),
    )


def packed_rows(tensor: Tensor) -> Tensor:
    """Pack (batch, num_heads, seqlen, head_dim) into (total, num_heads, head_dim).

    The lengths are those of `sequence_lengths`.
    """
    lengths = sequence_lengths(tensor.shape[0], tensor.shape[2]).tolist()
    pairs = zip(tensor, lengths, strict=True)
    return torch.cat([one[:, :length].transpose(0, 1) for one, length in pairs])


def packed_sequences(
    shape: Shape, device: torch.device, batch: int | None = None
) -> tuple[Tensor, Tensor, int, int]:
    """Return the arguments of varlen_attention for `packed_rows` of query, key and value.

    Args:
        batch: use only the first `batch` sequences; None means all.

    Returns:
        cu_seqlens and the maximum lengths of queries and keys.
    """
    lengths = shape.seqlen_q, shape.seqlen_k
    cu_seqlens_q, cu_seqlens_k = (
        cumulative(sequence_lengths(shape.batch, length)[:batch]).to(device) for length in lengths
    )
    return cu_seqlens_q, cu_seqlens_k, *lengths
