"""Masks of some heads and positions, and plans of ring attention, against dense masks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from helpers import drawn
from mask_draws import OTHERS, STRUCTURED, drawn_mask, packed_problem
from ring_cases import covered

from fused_attn import masks
from fused_attn.distributed import Sharding
from fused_attn.distributed.plan import pieces_of, plan_of, split_at_overlap
from fused_attn.distributed.visible_keys import VisibleKeys
from fused_attn.masks.intervals import intervals_of
from fused_attn.masks.materialize import materialize, sizes_of
from fused_attn.masks.restrict import of_heads, of_positions, without_first_keys
from fused_attn.masks.spec import MaskSpec, spec_of_mask

CPU = torch.device("cpu")


def spec_of(mask, shape):
    return spec_of_mask(mask, *shape, CPU)


def plans_of(shardings, lookup, **options):
    ranks = range(shardings[0].ranks)
    return [plan_of(*shardings, rank, lookup, **options) for rank in ranks]


def dense_of(spec, batch, heads, seqlen_q, seqlen_k):
    """Return visibility and score bias as full tensors; the bias is 0 for masked pairs."""
    sizes = batch, heads, seqlen_q, seqlen_k
    visible, bias = materialize(spec, *sizes, CPU, torch.float64)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if visible is None else visible
    bias = torch.zeros(1, 1, 1, 1) if bias is None else bias
    visible = (visible & (bias != float("-inf"))).expand(sizes)
    return visible, bias.expand(sizes).masked_fill(~visible, 0.0)


def numbers(count, most):
    """Return the indices of `most` random problems; all after the first `count` are thorough."""
    thorough = [pytest.param(n, marks=pytest.mark.thorough) for n in range(count, most)]
    return [*range(count), *thorough]


def random_range(draw, length):
    return range(*sorted(draw.sample(range(length + 1), 2)))


def slice_of(rows):
    return slice(rows.start, rows.stop)


def random_sharding(draw, length, ranks):
    """Distribute chunks of random lengths over the ranks."""
    ends = sorted({0, length, *(draw.randrange(length + 1) for _ in range(2 * ranks))})
    chunks = [range(a, b) for a, b in itertools.pairwise(ends)]
    draw.shuffle(chunks)
    return Sharding([chunks[rank::ranks] for rank in range(ranks)])


@pytest.mark.parametrize("number", numbers(80, 250))
def test_mask_of_positions_and_heads(number):
    draw = random.Random(number)
    shape = draw.choice([1, 2]), draw.choice([1, 3]), draw.randint(4, 40), draw.randint(4, 40)
    mask = drawn_mask(number, (*STRUCTURED, *OTHERS), shape)
    if number % 3 == 0:
        mask = mask & masks.alibi(torch.rand(shape[1], generator=drawn(1)))
    spec = spec_of(mask, shape)
    visible, bias = dense_of(spec, *shape)
    q, k = random_range(draw, shape[2]), random_range(draw, shape[3])
    heads = random_range(draw, shape[1]) if shape[1] > 1 else range(1)
    for rows, columns in split_at_overlap(q, k) if mask.prefixes else [(q, k)]:
        part = of_positions(of_heads(spec, slice_of(heads)), rows, columns)
        sizes = shape[0], len(heads), len(rows), len(columns)
        got_visible, got_bias = dense_of(part, *sizes)
        at = (slice(None), *map(slice_of, (heads, rows, columns)))
        expected = visible[at].clone()
        torch.testing.assert_close(got_visible, expected)
        torch.testing.assert_close(got_bias, bias[at], rtol=1e-6, atol=1e-6)
        if not mask.prefixes:
            fewer = without_first_keys(part, 2, (shape[0], len(rows), len(columns)), CPU)
            expected[..., :2] = False
            torch.testing.assert_close(dense_of(fewer, *sizes)[0], expected)


@pytest.mark.parametrize("number", numbers(60, 150))
def test_plan_computes_visible_pairs_once(number):
    draw = random.Random(number)
    shape = draw.choice([1, 2]), 2, draw.randint(8, 60), draw.randint(8, 60)
    mask = drawn_mask(number, (*STRUCTURED, *OTHERS), shape)
    spec, ranks = spec_of(mask, shape), draw.choice([2, 3, 5])
    shardings = tuple(random_sharding(draw, length, ranks) for length in shape[2:])
    prefix, lookup = bool(mask.prefixes), VisibleKeys(spec, shape)
    dropout = draw.random() < 0.3 and not prefix
    plans = plans_of(shardings, lookup, prefix=prefix, dropout=dropout)
    count = covered(plans, shardings, shape[2:])
    visible = dense_of(spec, *shape)[0].any(0).any(0)
    assert count.max() <= 1, "computed twice"
    assert bool((count[visible] == 1).all()), "not computed"
    if dropout or prefix or not intervals_of(spec, shape, CPU).exact:
        return
    for block in (block for plan in plans for step in plan.steps for block in step.blocks):
        seen = visible[slice_of(block.queries.positions)][:, slice_of(block.keys.positions)]
        assert seen[:, 0].any(), "no query attends to the first key of the block"
        assert seen[:, -1].any(), "no query attends to the last key of the block"


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents(
            torch.tensor([0, 1, 0, 2, 1, 2]),
            torch.tensor([[0, 1, 0, 1, 1, 2], [1, 1, 0, 2, 0, 1]]),
        ),
        masks.dense(torch.tensor([[1], [0], [0], [1], [0], [0]]).bool()),
        masks.dense(torch.tensor([[[0, 0, 1, 1, 0, 1]], [[0, 1, 0, 1, 0, 0]]]).bool()),
    ],
    ids=["documents", "queries", "keys"],
)
def test_masked_keys_at_both_ends_are_left_out(mask):
    shape = (2, 2, 6, 6)
    spec = spec_of(mask, shape)
    visible, lookup = dense_of(spec, *shape)[0].any(0).any(0), VisibleKeys(spec, shape)
    for queries in (range(1), range(1, 3), range(3, 5)):
        for keys in (range(6), range(2, 5)):
            at = visible[slice_of(queries)][:, slice_of(keys)].any(0).nonzero()
            at = (at + keys.start).flatten().tolist()
            assert lookup.of(queries, keys) == (range(at[0], at[-1] + 1) if at else None)


@pytest.mark.parametrize("number", numbers(20, 40))
def test_plan_of_packed_sequences(number):
    draw = random.Random(number)
    spec, shape, visible = packed_problem(number)
    starts = tuple(t.tolist() for t in (spec.cu_seqlens_q, spec.cu_seqlens_k))
    ranks = draw.choice([2, 4])
    shardings = tuple(random_sharding(draw, length, ranks) for length in shape[2:])
    prefix = spec.bounds is not None and bool((spec.bounds[:, 6] > 0).any())
    plans = plans_of(shardings, VisibleKeys(spec, shape), starts=starts, prefix=prefix)
    count = covered(plans, shardings, shape[2:], starts)
    assert count.max() <= 1
    assert bool((count[visible.any(0).any(0)] == 1).all())


def test_pieces_end_with_their_sequence():
    pieces = pieces_of(Sharding([[range(3)], [range(3, 9)]]), 1, [0, 2, 2, 5, 9])
    expected = [(range(2), range(1, 3), 2), (range(2, 6), range(4), 3)]
    assert [tuple(piece) for piece in pieces] == expected


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.causal(), 0.5),
        (masks.sliding_window(31, 0), 0.05),
        (masks.documents(torch.arange(1024) // 100), 0.1),
        (MaskSpec(), 1.0),
    ],
    ids=["causal", "window", "documents", "none"],
)
def test_only_visible_keys_are_received(mask, most):
    """Ranks receive half of the keys with a causal mask, at most 10 % with windows or documents."""
    length, ranks = 1024, 8
    spec = mask if isinstance(mask, MaskSpec) else spec_of(mask, (1, 1, length, length))
    sharding = Sharding.contiguous(length, ranks)
    plans = plans_of((sharding, sharding), VisibleKeys(spec, (1, 1, length, length)))
    received = sum(len(r) for plan in plans for step in plan.steps[1:] for r in step.wanted)
    share = received / (length * (ranks - 1))
    assert share == pytest.approx(most) if most in (0.5, 1.0) else share <= most


def test_shardings_are_partitions():
    with pytest.raises(ValueError, match="but 3 is missing"):
        Sharding([[range(3)], [range(4, 6)]])
    with pytest.raises(ValueError, match="2 is repeated"):
        Sharding([[range(3)], [range(2, 6)]])
    with pytest.raises(ValueError, match="at most 256 runs"):
        Sharding.of_positions([torch.arange(0, 1000, 2), torch.arange(1, 1000, 2)])
    zigzag = Sharding.zigzag(20, 3)
    assert zigzag == Sharding.of_positions([zigzag.positions(rank) for rank in range(3)])
    assert zigzag.merged(3).runs == ((range(20),),)


def test_prefix_with_dropout_requires_runs_at_multiples_of_8():
    shape = 1, 1, 40, 40
    lookup = VisibleKeys(spec_of(masks.prefix_lm(torch.tensor([9])), shape), shape)
    aligned, unaligned = Sharding.of_lengths([16, 24]), Sharding.of_lengths([17, 23])
    for rank in range(2):
        plan_of(aligned, aligned, rank, lookup, prefix=True, dropout=True)
        with pytest.raises(ValueError, match="begin at a multiple of 8"):
            plan_of(unaligned, unaligned, rank, lookup, prefix=True, dropout=True)


def test_sizes_of_a_mask():
    assert sizes_of(masks.causal()) == (1, 1)
    assert sizes_of(masks.alibi(torch.rand(6)) & masks.padding([3, 2])) == (2, 6)
    dense = masks.dense(torch.ones(4, 9, 9).bool())
    assert sizes_of(dense & masks.bias(torch.zeros(9, 9))) == (1, 4)
