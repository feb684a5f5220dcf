"""The attention problems that `bench` measures: sizes and masks that can be named in a shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.masks import Mask

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention problem, as in `fused_attn.scaled_dot_product_attention`.

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
        """batch,heads,seqlen_q,seqlen_k,head_dim; heads may be heads/heads_kv.

        Raises:
            ValueError: it is something else.
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
                f"(with fewer heads of keys) 2,8/2,512,512,64, got {text!r}"
            ) from None
        if min(vars(shape).values()) < 1 or shape.num_heads % shape.num_heads_kv:
            raise ValueError(
                f"shape must have positive sizes, and heads that heads_kv divides, got {text!r}"
            )
        return shape

    def __str__(self) -> str:
        heads = str(self.num_heads)
        if self.num_heads != self.num_heads_kv:
            heads += f"/{self.num_heads_kv}"
        return f"{self.batch},{heads},{self.seqlen_q},{self.seqlen_k},{self.head_dim}"

    def operands(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """query, key and value, the same every time."""
        generator = torch.Generator(device).manual_seed(0)
        sizes = {"query": (self.num_heads, self.seqlen_q)}
        sizes |= dict.fromkeys(("key", "value"), (self.num_heads_kv, self.seqlen_k))
        return {
            name: torch.randn(
                self.batch, *size, self.head_dim, generator=generator, device=device
            ).to(dtype)
            for name, size in sizes.items()
        }


# ---- masks --------------------------------------------------------------------------------------


def _padding(shape: Shape, _: int) -> Mask:
    return masks.padding((shape.seqlen_k * torch.linspace(0.25, 1.0, shape.batch)).ceil().long())


def _prefix(shape: Shape, _: int) -> Mask:
    return masks.prefix_lm([shape.seqlen_k // 4] * shape.batch)


def _documents(shape: Shape, size: int) -> Mask:
    return masks.documents(
        torch.arange(shape.seqlen_q) // size, torch.arange(shape.seqlen_k) // size
    )


def _alibi(shape: Shape, _: int) -> Mask:
    return masks.alibi(2.0 ** (-8.0 / shape.num_heads * torch.arange(1.0, shape.num_heads + 1)))


def _random(shape: Shape, _: int) -> Mask:
    generator = torch.Generator().manual_seed(0)
    return masks.dense(torch.rand(shape.seqlen_q, shape.seqlen_k, generator=generator) < 0.5)


@dataclass(frozen=True)
class MaskKind:
    """A mask that can be asked for by name: what it is, how to make it, its size if it has one."""

    what: str
    make: Callable[[Shape, int], Mask]
    size: int = 0


MASKS = {
    "causal": MaskKind("query i sees keys up to i", lambda *_: masks.causal()),
    "causal_bottom_right": MaskKind(
        "the last query sees all keys", lambda *_: masks.causal("bottom_right")
    ),
    "window": MaskKind(
        "causal, of 256 keys; window:SIZE of SIZE",
        lambda _, size: masks.sliding_window(size - 1),
        size=256,
    ),
    "padding": MaskKind("sequences of a quarter to all of seqlen_k", _padding),
    "prefix": MaskKind("causal beyond the first quarter of the keys", _prefix),
    "documents": MaskKind("documents of 256 tokens; documents:SIZE of SIZE", _documents, size=256),
    "alibi": MaskKind("a linear bias, another slope for each head", _alibi),
    "random": MaskKind("a bool tensor, half of it true", _random),
}  # fmt: skip


def make_mask(text: str, shape: Shape) -> Mask | None:
    """The mask that `text` names for a shape: "none", or names of `MASKS` joined by "+".

    Raises:
        ValueError: it names something else.

    Example:
        >>> make_mask("causal+window:128", shape)
    """
    mask = None
    for part in [] if text == "none" else text.split("+"):
        name, _, size = part.partition(":")
        kind = MASKS.get(name)
        if kind is None or (size and not (kind.size and size.isdecimal() and int(size))):
            sized = [f"{name}[:SIZE]" if kind.size else name for name, kind in MASKS.items()]
            raise ValueError(
                f"mask must be none, or of {', '.join(sized)}, joined by +, got {text!r}"
            )
        own = kind.make(shape, int(size or kind.size))
        mask = own if mask is None else mask & own
    return mask
