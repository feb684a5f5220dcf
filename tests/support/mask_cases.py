"""Masks of every kind, for shapes with at least two sequences of at least 4 positions.

The masks include named kinds (fused_attn/tools/cases.py) and edge cases: empty sequences, two-sided
windows, steep slopes, and tensors of every broadcast shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from helpers import drawn

from fused_attn import masks
from fused_attn.masks import Mask
from fused_attn.masks.tables import as_bits
from fused_attn.tools.cases import Shape, make_mask


def _lengths(batch: int, seqlen: int, seed: int) -> torch.Tensor:
    """Draw random lengths. The first is 0, and the last is `seqlen`."""
    generator = drawn(seed)
    lengths = torch.randint(0, seqlen + 1, (batch,), generator=generator)
    lengths[0] = 0
    lengths[-1] = seqlen
    return lengths


def _partial(batch: int, seqlen: int, seed: int) -> torch.Tensor:
    """Draw nonzero lengths, so that a mask that combines them with `_lengths` has visible keys."""
    generator = drawn(seed)
    return torch.randint(max(seqlen // 4, 1), max(seqlen, 2), (batch,), generator=generator)


def _dense(*shape: int, seed: int, visible: float = 0.5) -> torch.Tensor:
    generator = drawn(seed)
    mask = torch.rand(*shape, generator=generator) < visible
    mask[..., : shape[-1] // 3] &= torch.rand(shape[-2], 1, generator=generator) < 0.7
    return mask


def _windows_of_heads(num_heads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Return key intervals along the diagonal; each head has a different window size."""
    center = torch.arange(seqlen_q) * seqlen_k // seqlen_q
    radius = 2 + 3 * torch.arange(num_heads)[:, None]
    ends = torch.stack([center - radius, center + radius], dim=-1)
    return ends.clamp(0, seqlen_k)[None]


def _named(text: str) -> Callable[[int, int, int, int], Mask]:
    def make(batch: int, num_heads: int, seqlen_q: int, seqlen_k: int) -> Mask:
        return make_mask(text, Shape(batch, num_heads, num_heads, seqlen_q, seqlen_k, 1))

    return make


# Name -> function of (batch, num_heads, seqlen_q, seqlen_k) that returns a mask.
MASKS: dict[str, Callable[[int, int, int, int], Mask]] = {
    "causal": _named("causal"),
    "causal_bottom_right": _named("causal_bottom_right"),
    "window": lambda b, h, m, n: masks.sliding_window(n // 5, n // 9),
    "window_right_only": lambda b, h, m, n: masks.sliding_window(-1, 3, align="bottom_right"),
    "padding": lambda b, h, m, n: masks.padding(_lengths(b, n, 1)),
    "padding_left": lambda b, h, m, n: masks.padding(_lengths(b, n, 2), side="left"),
    "ragged": lambda b, h, m, n: masks.padding(_lengths(b, n, 3), _partial(b, m, 4)),
    "ragged_left": lambda b, h, m, n: masks.padding(
        _partial(b, n, 5), _lengths(b, m, 6), side="left"
    ),
    "prefix": lambda b, h, m, n: masks.prefix_lm(_lengths(b, n, 7)),
    "documents": lambda b, h, m, n: masks.documents(
        torch.arange(m).expand(b, -1) * 4 // m, torch.arange(n).expand(b, -1) * 4 // n
    ),
    "documents_shuffled": lambda b, h, m, n: masks.documents(
        (torch.arange(m) * 7) % 5, (torch.arange(n) * 3) % 5
    ),
    "alibi": lambda b, h, m, n: masks.alibi(2.0 ** -torch.arange(1.0, h + 1)),
    "alibi_batch": lambda b, h, m, n: masks.alibi(
        torch.rand(b, h, generator=drawn(8)), align="bottom_right"
    ),
    "dense": lambda b, h, m, n: masks.dense(_dense(m, n, seed=9)),
    "dense_full": lambda b, h, m, n: masks.dense(_dense(b, h, m, n, seed=10)),
    "dense_blocks": _named("blocks:64"),  # fully masked and fully visible tiles
    "dense_transposed": lambda b, h, m, n: masks.dense(_dense(b, 1, n, m, seed=11).mT),
    "dense_per_query": lambda b, h, m, n: masks.dense(_dense(b, 1, m, 1, seed=12)),
    "key_mask": lambda b, h, m, n: masks.dense(_dense(b, 1, 1, n, seed=13)),
    "key_mask_head": lambda b, h, m, n: masks.dense(_dense(h, 1, 2 * n, seed=14)[..., ::2]),
    "intervals": lambda b, h, m, n: Mask(intervals=(_windows_of_heads(h, m, n),)),
    "images": lambda b, h, m, n: (
        masks.causal() | masks.documents(torch.arange(m) // 9, torch.arange(n) // 9)
    ),
    "bits": lambda b, h, m, n: Mask(bits=(as_bits(_dense(b, h, m, n, seed=16)),)),
    "bias_with_inf": lambda b, h, m, n: masks.bias(
        torch.where(_dense(m, n, seed=15), 0.3, float("-inf"))
    ),
    "bias_causal": lambda b, h, m, n: masks.bias(
        torch.full((m, n), float("-inf")).triu(1)  # kernels need not read tiles of zeros
    ),
}
# Each of these masks sets different fields of MaskSpec or columns of its `bounds`. Together, they
# cover the distinct code paths of the kernels. Only backend "cpp" reads intervals.
FIELDS = (
    "window", "ragged_left", "prefix", "documents_shuffled",
    "dense_full", "key_mask_head", "bias_with_inf", "alibi_batch",
)  # fmt: skip
# Marker for tests of each mask in each dtype: masks other than those of FIELDS run in float32 and
# bfloat16. Kernels read masks alike for each dtype, but float64 scores are another type.
OTHER_MASKS = pytest.mark.sampled(
    "covered by float32 and bfloat16",
    dtype=[torch.float64, torch.float16],
    name=MASKS.keys() - {*FIELDS, "causal", "intervals", "bits"},
)
# All pairs that can be combined. `make test` runs the pairs of FIELDS and "intervals".
PAIRS = [
    pytest.param(
        pair,
        id="-".join(pair),
        marks=() if {*pair} <= {*FIELDS, "intervals"} else pytest.mark.thorough,
    )
    for pair in itertools.combinations(MASKS, 2)
    if pair != ("alibi", "alibi_batch")  # their alignments differ, see test_errors.py
]
