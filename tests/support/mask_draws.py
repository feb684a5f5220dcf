"""Random masks, combinations of them, and packed sequences, each determined by a number."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_attn import masks
from fused_attn.call.packed import packed_spec
from fused_attn.masks import Mask
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import MaskSpec
from fused_attn.masks.tables import as_bits

# In a STRUCTURED mask, the visible keys of each query form one interval, unlike in OTHERS.
STRUCTURED = (
    "band", "padding", "padding_left", "ragged", "prefix", "documents", "runs", "intervals",
)  # fmt: skip
OTHERS = ("shuffled", "key_mask", "dense", "bits", "bias", "intervals_of_heads")
Shape = tuple[int, int, int, int]


def drawn_mask(number: int, kinds: Sequence[str], shape: Shape) -> Mask:
    """Draw a mask, or a combination of two or three kinds.

    Args:
        shape: (batch, num_heads, seqlen_q, seqlen_k).
    """
    draw = random.Random(number)
    mask = None
    for kind in draw.sample(kinds, draw.choice([1, 1, 2, 3])):
        own = mask_of(kind, draw, shape)
        mask = own if mask is None else mask & own
    assert mask is not None
    return mask


def mask_of(kind: str, draw: random.Random, shape: Shape) -> Mask:
    """Draw a mask of one kind."""
    batch, num_heads, seqlen_q, seqlen_k = shape
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if kind == "band":
        sides = [draw.choice([-1, 0, draw.randint(0, 2 * seqlen_k)]) for _ in range(2)]
        return masks.sliding_window(*sides, align=draw.choice(["top_left", "bottom_right"]))
    if kind in ("padding", "padding_left"):
        side = "left" if kind == "padding_left" else "right"
        return masks.padding(_lengths(draw, batch, seqlen_k), side=side)
    if kind == "ragged":
        keys, queries = _lengths(draw, batch, seqlen_k), _lengths(draw, batch, seqlen_q)
        return masks.padding(keys, queries, draw.choice(["right", "left"]))
    if kind == "prefix":
        return masks.prefix_lm(_lengths(draw, batch, seqlen_k))
    if kind == "bias":
        masked = torch.rand(num_heads, seqlen_q, seqlen_k, generator=generator) < 0.4
        masked[..., : seqlen_k // 2] |= torch.rand(1, seqlen_q, 1, generator=generator) < 0.9
        return masks.bias(torch.zeros(masked.shape).masked_fill(masked, float("-inf")))
    if kind in ("key_mask", "dense", "bits"):
        rows = 1 if kind == "key_mask" else seqlen_q
        sizes = draw.choice([batch, 1]), draw.choice([num_heads, 1]), rows, seqlen_k
        dense = torch.rand(*sizes, generator=generator) < 0.7
        dense[..., seqlen_k // 3 : 2 * (seqlen_k // 3)] = draw.random() < 0.5
        return Mask(bits=(as_bits(dense),)) if kind == "bits" else masks.dense(dense)
    if kind.startswith("intervals"):
        heads = num_heads if kind == "intervals_of_heads" else 1
        sizes = draw.choice([batch, 1]), heads, seqlen_q, 2
        table = torch.randint(0, seqlen_k + 1, sizes, generator=generator)
        return Mask(intervals=(table.sort(-1).values if draw.random() < 0.8 else table,))
    size = draw.choice([(), (batch,)])
    ids = [torch.randint(0, 5, (*size, n), generator=generator) for n in (seqlen_q, seqlen_k)]
    if kind != "shuffled":
        ids = [t.sort(-1).values for t in ids]
    if kind == "runs":  # contiguous, but not sorted
        ids = [torch.tensor([3, 0, 4, 1, 2])[t] for t in ids]
    return masks.documents(*ids)


def _lengths(draw: random.Random, batch: int, seqlen: int) -> Tensor:
    return torch.tensor([draw.choice([0, seqlen, draw.randint(0, seqlen)]) for _ in range(batch)])


def visible_of(spec: MaskSpec, shape: Shape) -> Tensor:
    """Return the visible positions of a mask as a bool tensor of the given shape."""
    visible, _ = materialize(spec, *shape, torch.device("cpu"), torch.float32)
    return torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)


def packed_problem(number: int) -> tuple[MaskSpec, Shape, Tensor]:
    """Draw packed sequences with two heads, and a mask.

    Returns:
        the spec, the shape (1, 2, total_q, total_k), and the visible positions in that shape.
    """
    draw = random.Random(number)
    sizes = [(draw.randint(0, 40), draw.randint(0, 40)) for _ in range(draw.randint(0, 4))]
    sizes.append((draw.randint(1, 40), draw.randint(1, 40)))
    starts = [torch.tensor([0, *(n[i] for n in sizes)]).cumsum(0) for i in range(2)]
    longest = [max(n[i] for n in sizes) for i in range(2)]
    kinds = ("band", "prefix", "documents", "runs", "shuffled", "key_mask", "dense", "bias")
    within = (len(sizes), 2, *longest)
    mask = drawn_mask(number, kinds, within)  # type: ignore[arg-type]
    total_q, total_k = (int(t[-1]) for t in starts)
    query, key = torch.empty(total_q, 2, 8), torch.empty(total_k, 2, 8)
    spec = packed_spec(query, key, *starts, *longest, mask, False)  # type: ignore[call-arg, arg-type]
    padded = visible_of(spec, within)  # type: ignore[arg-type]
    visible = torch.zeros(1, 2, total_q, total_k, dtype=torch.bool)
    for b, (n, m) in enumerate(sizes):
        rows, columns = (slice(int(t[b]), int(t[b + 1])) for t in starts)
        visible[0, :, rows, columns] = padded[b, :, :n, :m]
    return spec, (1, 2, total_q, total_k), visible
