"""Random mask expressions, evaluated both as a Mask and, independently, position by position.

An expression is a JSON value: ["and" | "or", expression, ...], or a kind and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from fused_attn import masks

ALIGNS, SIDES = st.sampled_from(masks.ALIGNMENTS), st.sampled_from(["right", "left"])
KINDS = ("band", "padding", "prefix", "documents", "dense", "left", "mod", "bias", "alibi")
Shape = tuple[int, int, int, int]  # (batch, num_heads, seqlen_q, seqlen_k)
# Functions for from_mask_mod of indices b, h, q, k, a number n, and IDs of queries and of keys.
MODS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, q, k, n, of_q, of_k: k <= q,
    "window": lambda b, h, q, k, n, of_q, of_k: (q - k).abs() <= n,
    "chunks": lambda b, h, q, k, n, of_q, of_k: q // n == k // n,
    "comb": lambda b, h, q, k, n, of_q, of_k: (q + k) % n == 0,
    "heads": lambda b, h, q, k, n, of_q, of_k: k <= q + h * n,
    "ids": lambda b, h, q, k, n, of_q, of_k: of_q[q] == of_k[k],
}


class Positions(NamedTuple):
    """Indices of sequences, heads, queries and keys, and the ends of queries and keys."""

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor
    end_q: Tensor
    end_k: Tensor

    def diagonal(self, align: str) -> Tensor:
        """Return the key position on the diagonal for each query."""
        return self.q if align == "top_left" else self.q + self.end_k - self.end_q


class Expression:
    """Mask expression for one shape, with tensors that `change` modifies in place."""

    def __init__(self, tree: list[Any], shape: Shape) -> None:
        self.kind, *self.arguments = tree
        self.members: list[Expression] = []
        self.tensors: list[Tensor] = []
        if self.kind in ("and", "or"):
            self.members = [Expression(member, shape) for member in self.arguments]
            self.tensors = [t for member in self.members for t in member.tensors]
            self.mask, *others = [member.mask for member in self.members]
            for mask in others:
                self.mask = self.mask & mask if self.kind == "and" else self.mask | mask
        else:
            self._make(shape, *self.arguments)

    def change(self) -> None:
        """Reverse the last dimension of each tensor in place."""
        for tensor in self.tensors:
            tensor.copy_(tensor.flip(-1))

    def _make(self, shape: Shape, *arguments: Any) -> None:
        """Create the tensors, the Mask, and `_see`, which returns the visible positions."""
        see: Callable[[Positions], Tensor] = lambda p: torch.ones((), dtype=torch.bool)  # noqa: E731
        if self.kind == "band":
            left, right, align = arguments
            self.mask = masks.sliding_window(left, right, align)
            low, high = (torch.inf if n == -1 else n for n in (left, right))
            see = lambda p: (p.k - p.diagonal(align)).clamp(-low, high) == p.k - p.diagonal(align)  # noqa: E731
        elif self.kind == "padding":
            *lengths, side = arguments
            self.tensors = [torch.tensor(n) for n in lengths if n is not None]
            self.mask = masks.padding(*self.tensors, side=side)  # type: ignore[misc]
            see = self._real
        elif self.kind == "prefix":
            self.tensors = [torch.tensor(arguments[0])]
            self.mask = masks.prefix_lm(*self.tensors)
            see = lambda p: (p.k <= p.q) | (p.k < self.tensors[0].view(-1, 1, 1, 1))  # noqa: E731
        elif self.kind == "documents":
            self.tensors = [_ids(shape, d, *arguments) for d in (2, 3)]
            self.mask = masks.documents(*self.tensors)
            see = lambda p: self.tensors[0][:, None, :, None] == self.tensors[1][:, None, None]  # noqa: E731
        elif self.kind == "mod":
            name, n = arguments
            of_q, of_k = self.tensors = [_ids(shape, d, n, False, True)[0] for d in (2, 3)]
            self.mask = masks.from_mask_mod(lambda *at: MODS[name](*at, n, of_q, of_k))
            see = lambda p: MODS[name](p.b, p.h, p.q, p.k, n, of_q, of_k)  # noqa: E731
        elif self.kind == "alibi":
            slopes, align = arguments
            self.tensors = [torch.tensor(slopes)]
            self.mask = masks.alibi(self.tensors[0], align)
        elif self.kind == "left":  # left padding of a cache
            starts = torch.tensor(arguments[0]).view(-1, 1, 1, 1)
            self.tensors = [torch.arange(shape[3]) >= starts]
            self.mask = masks.dense(self.tensors[0])
            see = lambda p: self.tensors[0]  # noqa: E731
        else:
            seed, broadcast, masked, *dtype = arguments
            sizes = [1 if d in broadcast else n for d, n in enumerate(shape)]
            drawn = torch.rand(sizes, generator=torch.Generator().manual_seed(seed))
            self.tensors = [drawn >= masked]
            if dtype:
                bias = drawn.mul(8).sub(4).masked_fill(drawn < masked, -torch.inf)
                self.tensors = [bias.to(getattr(torch, *dtype))]
            self.mask = (masks.bias if dtype else masks.dense)(self.tensors[0])
            see = lambda p: self.tensors[0] != (-torch.inf if dtype else 0)  # noqa: E731
        self._see = see

    def _real(self, p: Positions) -> Tensor:
        visible = torch.ones((), dtype=torch.bool)
        for lengths, position in zip(self.tensors, (p.k, p.q), strict=False):
            lengths = lengths.view(-1, 1, 1, 1)
            left = position > position.max() - lengths
            visible = visible & (left if self.arguments[-1] == "left" else position < lengths)
        return visible

    def by_hand(self, shape: Shape, end_q: Tensor, end_k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the visible positions and the float64 bias, both expanded to the given shape.

        Args:
            end_q, end_k: lengths of the sequences, scalars or (batch, 1, 1, 1).
        """
        at = [torch.arange(n).view([-1 if d == i else 1 for d in range(4)])
              for i, n in enumerate(shape)]  # fmt: skip
        visible, bias = self._evaluate(Positions(*at, end_q, end_k))
        return visible.expand(shape), bias.expand(shape)

    def _evaluate(self, p: Positions) -> tuple[Tensor, Tensor]:
        for padding in self._paddings():
            keys, queries = [*(t.view(-1, 1, 1, 1) for t in padding.tensors), p.end_q][:2]
            p = p._replace(
                end_q=torch.minimum(p.end_q, queries), end_k=torch.minimum(p.end_k, keys)
            )
        if self.members:
            (visible, bias), *others = (member._evaluate(p) for member in self.members)
            for own, own_bias in others:
                visible, bias = (
                    visible & own if self.kind == "and" else visible | own, bias + own_bias
                )  # fmt: skip
            return visible, bias
        visible, bias = self._see(p), torch.zeros((), dtype=torch.float64)
        if self.kind == "bias":
            bias = self.tensors[0].double().masked_fill(~visible, 0.0)
        if self.kind == "alibi":
            distance = (p.diagonal(self.arguments[-1]) - p.k).abs()
            bias = -self.tensors[0].double().view(-1, 1, 1) * distance
        return visible, bias

    def _paddings(self) -> list[Expression]:
        """Return the padding masks with side="right", whose lengths end the sequences."""
        if self.kind == "and":
            return [own for member in self.members for own in member._paddings()]
        return [self] if self.kind == "padding" and self.arguments[-1] == "right" else []


def _ids(shape: Shape, dim: int, seed: int, batched: bool, is_sorted: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed + shape[dim])
    ids = torch.randint(0, 4, (shape[0] if batched else 1, shape[dim]), generator=generator)
    return ids.sort(-1).values if is_sorted else ids


# ---- strategies ---------------------------------------------------------------------------------


def lengths_of(batch: int, seqlen: int) -> st.SearchStrategy[list[int]]:
    """Return a strategy of one length in [0, seqlen] for each sequence, often 0 or seqlen."""
    one = st.one_of(st.just(seqlen), st.integers(0, seqlen), st.just(0))
    return st.lists(one, min_size=batch, max_size=batch)


def _leaf(kind: str, shape: Shape) -> st.SearchStrategy[list[Any]]:
    batch, num_heads, seqlen_q, seqlen_k = shape
    seed, keys = st.integers(0, 99), lengths_of(batch, seqlen_k)
    width = st.one_of(st.just(-1), st.integers(0, seqlen_k + 2))
    broadcast = st.lists(st.integers(0, 3), unique=True, max_size=3).map(sorted)
    masked = st.sampled_from([0.3, 0.0, 0.9, 1.0])
    slope = st.sampled_from([0.5, 0.1, 2.0, 0.0])
    arguments: dict[str, list[st.SearchStrategy[Any]]] = {
        "band": [width, width, ALIGNS],
        "padding": [keys, st.one_of(st.none(), lengths_of(batch, seqlen_q)), SIDES],
        "prefix": [keys],
        "documents": [seed, st.booleans(), st.booleans()],
        "dense": [seed, broadcast, masked],
        "left": [keys],
        "mod": [st.sampled_from(sorted(MODS)), st.integers(1, 20)],
        "bias": [seed, broadcast, masked, st.sampled_from(["float32", "float16", "bfloat16"])],
        "alibi": [st.lists(slope, min_size=num_heads, max_size=num_heads), ALIGNS],
    }
    return st.tuples(st.just(kind), *arguments[kind]).map(list)


@st.composite
def trees(draw: st.DrawFn, shape: Shape, kinds: Sequence[str] = (*KINDS, "or")) -> Any:
    """Draw an expression that combines up to three kinds or unions; None stands for no mask."""
    plain = st.sampled_from(KINDS[:-2]).flatmap(lambda kind: _leaf(kind, shape))
    members: list[Any] = []
    for kind in draw(st.lists(st.sampled_from(kinds), unique=True, max_size=3)):
        if kind == "or":
            both = st.tuples(st.just("and"), plain, plain).map(list)
            members.append(["or", draw(plain), draw(st.one_of(plain, both))])
        else:
            members.append(draw(_leaf(kind, shape)))
    return ["and", *members] if len(members) > 1 else (members or [None])[0]


def is_fixed(tree: list[Any] | None) -> bool:
    """Return True if an expression has tensors whose size depends on the number of queries."""
    if tree is None or tree[0] in ("and", "or"):
        return any(is_fixed(member) for member in (tree or [])[1:])
    padded = tree[0] == "padding" and tree[2] is not None
    return padded or tree[0] in ("documents", "dense", "bias", "mod")
