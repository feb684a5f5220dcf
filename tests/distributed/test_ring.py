"""Ring and all-to-all attention on four ranks, compared with one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import assert_like_eager, drawn, random_qkv
from mask_cases import FIELDS, MASKS
from ring_cases import (
    SEED,
    Case,
    cross_attention,
    positions_as_tensors,
    run_ahead,
    run_both_on_rank,
    run_on_rank,
    second_derivative,
)

from fused_attn import masks
from fused_attn.distributed import Sharding

BATCH, HEADS, HEADS_KV, LENGTH, LENGTH_K, HEAD_DIM = 2, 4, 2, 61, 44, 16
RANKS = 4
METHODS = {"ring": ("ring", (4,)), "all_to_all": ("all_to_all", (4,)), "hybrid": ("ring", (2, 2))}


def shardings(number, length):
    """Return one of five shardings of the positions, selected by number % 5."""
    third, chunks = length // 3, torch.arange(length).split(6)
    order = torch.randperm(len(chunks), generator=drawn(number)).tolist()
    return [
        Sharding.zigzag(length, RANKS),
        Sharding.of_lengths([third, 0, length - third - 5, 5]),
        Sharding.contiguous(length, RANKS),
        Sharding.of_positions([torch.cat(chunks[rank::RANKS]) for rank in range(RANKS)]),
        Sharding.of_positions(
            [torch.cat([chunks[i] for i in order[rank::RANKS]]) for rank in range(RANKS)]
        ),
    ][number % 5]


def assert_right(ranks, case, dtype, bias=None, lengths=(LENGTH, LENGTH), head_dim_v=HEAD_DIM):
    tensors = random_qkv(BATCH, HEADS, HEADS_KV, *lengths, HEAD_DIM, head_dim_v)
    if case.packed:
        tensors = {n: t[0].transpose(0, 1).contiguous() for n, t in tensors.items()}
    assert_like_eager(case.of(ranks), {**tensors, "bias": bias}, dtype, "cpp")


def case_of(method, number, mask, lengths=(LENGTH, LENGTH), **options):
    name, mesh = METHODS[method]
    queries = shardings(number, lengths[0])
    keys = queries if lengths[0] == lengths[1] else shardings(number + 1, lengths[1])
    return Case(name, mesh, (queries, keys), mask, enable_gqa=True, **options)


def one_of(first, second, number):
    """Return `first` for even numbers and `second` for odd ones."""
    return second if number % 2 else first


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name, method, ranks):
    number = list(MASKS).index(name)
    dtype = one_of(torch.float32, torch.bfloat16, number + list(METHODS).index(method))
    mask = MASKS[name](BATCH, HEADS, LENGTH, LENGTH)
    assert_right(ranks, case_of(method, number, mask), dtype)


def sampled(pairs, every):
    """Return all pairs as parameters; all but every `every`-th are marked as thorough."""
    return [
        pytest.param(*pair, marks=[] if i % every == 0 else pytest.mark.thorough)
        for i, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize(("first", "second"), sampled(itertools.combinations(MASKS, 2), 17))
def test_pairs_of_masks(first, second, ranks):
    mask = MASKS[first](BATCH, HEADS, LENGTH, LENGTH)
    other = MASKS[second](BATCH, HEADS, LENGTH, LENGTH)
    if {first, second} == {"alibi", "alibi_batch"}:
        pytest.skip("reason: combined ALiBi masks must have the same align")
    number = list(MASKS).index(first) + list(MASKS).index(second)
    dtype, method = one_of(torch.float32, torch.bfloat16, number), list(METHODS)[number % 3]
    assert_right(ranks, case_of(method, number, mask & other), dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [(10, 3), (0, 0)])
def test_ranks_without_visible_keys(lengths, method, ranks):
    """Results are correct if visible keys are on the first rank only, or on no rank."""
    mask = masks.padding(torch.tensor(lengths), torch.tensor(lengths))
    sharding = Sharding.contiguous(LENGTH, RANKS)
    name, mesh = METHODS[method]
    case = Case(name, mesh, (sharding, sharding), mask, enable_gqa=True)
    assert_right(ranks, case, torch.bfloat16)


@pytest.mark.parametrize("method", METHODS)
def test_nan_behind_the_mask_reaches_nothing(method, ranks):
    lengths = torch.tensor([LENGTH - 20, LENGTH - 7])
    tensors = random_qkv(BATCH, HEADS, HEADS_KV, LENGTH, LENGTH, HEAD_DIM)
    for b, length in enumerate(lengths.tolist()):
        tensors["key"][b, :, length:] = float("nan")
        tensors["value"][b, :, length:] = float("inf")
    case = case_of(method, 0, masks.padding(lengths))
    given = [*tensors.values(), None]
    grads = torch.ones(BATCH, HEADS, LENGTH, HEAD_DIM), torch.ones(BATCH, HEADS, LENGTH)
    for results in (ranks.run(run_on_rank, case, given, None, None),
                    ranks.run(run_on_rank, case, given, *grads)):  # fmt: skip
        for result in results:
            for name, tensor in result.items():
                assert bool(tensor.isfinite().all()), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FIELDS)
def test_queries_and_keys_of_different_lengths(name, method, ranks):
    lengths, dtype = (LENGTH, LENGTH_K), one_of(torch.float64, torch.bfloat16, FIELDS.index(name))
    mask = MASKS[name](BATCH, HEADS, *lengths)
    assert_right(
        ranks, case_of(method, list(MASKS).index(name), mask, lengths), dtype, None, lengths, 8
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "per_head"),
    [((1, 1), True), ((LENGTH, LENGTH), True), ((LENGTH, LENGTH), False), ((1, LENGTH), False),
     ((LENGTH, 1), True)],
)  # fmt: skip
def test_gradient_of_a_bias(shape, per_head, method, ranks):
    """The sum of the ranks' bias gradients equals the gradient of one process."""
    dtype = one_of(torch.float32, torch.bfloat16, per_head)
    sizes = (BATCH, HEADS, *shape) if per_head else shape
    bias = torch.randn(sizes, generator=drawn(1))
    case = case_of(method, sum(shape), MASKS["causal"](BATCH, HEADS, LENGTH, LENGTH))
    assert_right(ranks, case, dtype, bias)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", range(5))
def test_dropout(number, method, ranks):
    """A sharded call drops the same weights as one process, regardless of shard boundaries."""
    dtype = one_of(torch.float32, torch.bfloat16, number)
    softcap = one_of(None, 5.0, number // 2)
    mask = MASKS["window"](BATCH, HEADS, LENGTH, LENGTH)
    case = case_of(method, number, mask, dropout_p=0.3, seed=SEED, softcap=softcap)
    assert_right(ranks, case, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_dropout_with_a_prefix(method, ranks):
    mask, sharding = masks.prefix_lm(torch.tensor([20, 5])), Sharding.of_lengths([16, 24, 8, 13])
    options = {"dropout_p": 0.3, "seed": SEED, "enable_gqa": True}
    assert_right(
        ranks, Case(*METHODS[method], (sharding, sharding), mask, **options), torch.float32
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [None, "causal", "window", "prefix", "alibi", "dense"])
def test_packed_sequences(name, method, ranks):
    dtype = one_of(torch.float32, torch.bfloat16, len(name or "") % 2)
    ends = torch.tensor([0, 0, 7, 30, LENGTH])
    sizes = len(ends) - 1, HEADS, 31, 31
    mask = None if name is None else MASKS[name](*sizes)
    drops = {} if name == "prefix" else {"dropout_p": 0.2, "seed": SEED}
    case = case_of(
        method, len(name or ""), mask, cu_seqlens_q=ends, is_causal=name is None, **drops
    )
    assert_right(ranks, case, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_are_equal_bit_by_bit(method, ranks):
    tensors = random_qkv(BATCH, HEADS, HEADS_KV, LENGTH, LENGTH, HEAD_DIM)
    given = [t.to(torch.bfloat16) for t in tensors.values()] + [None]
    grads = torch.randn_like(given[0]), torch.randn(given[0].shape[:3])
    case = case_of(method, 0, MASKS["ragged"](BATCH, HEADS, LENGTH, LENGTH), dropout_p=0.1, seed=3)
    first, second = (ranks.run(run_on_rank, case, given, *grads) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_number_of_steps_in_flight(method, ranks):
    """Results are bitwise identical with one, two and the default number of steps in flight."""
    tensors = random_qkv(BATCH, HEADS, HEADS_KV, LENGTH, LENGTH, HEAD_DIM)
    given = [*tensors.values(), None]
    grads = torch.randn_like(given[0]), torch.randn(given[0].shape[:3])
    case = case_of(method, 3, MASKS["causal"](BATCH, HEADS, LENGTH, LENGTH))
    expected = ranks.run(run_on_rank, case, given, *grads)
    for ahead in (1, 2):
        got = ranks.run(run_ahead, ahead, case, given, *grads)
        for one, other in zip(got, expected, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", METHODS)
def test_masks_that_share_a_tensor(method, ranks):
    """The plan of a narrow mask is not reused for a wide one with the same tensor."""
    ids = torch.arange(LENGTH) // 30
    documents, tensors = masks.documents(ids), random_qkv(BATCH, HEADS, HEADS_KV, 61, 61, HEAD_DIM)
    narrow, wide = documents & masks.sliding_window(4, 0), documents & masks.causal()
    sharding = Sharding.contiguous(LENGTH, RANKS)
    cases = [
        Case(*METHODS[method], (sharding, sharding), m, enable_gqa=True) for m in (narrow, wide)
    ]
    for results in ranks.run(run_both_on_rank, cases, [*tensors.values(), None]):
        for case, got in zip(cases, results, strict=True):
            whole = case.in_one_process(*tensors.values())[0]
            rows = whole.index_select(2, sharding.positions(got["rank"]))
            torch.testing.assert_close(got["out"], rows)


def test_second_derivatives_are_refused(ranks):
    message = "distributed attention does not support second derivatives"
    assert ranks.run(second_derivative) == [message] * 4


@pytest.mark.parametrize("method", METHODS)
def test_cross_attention_without_positions(method, ranks):
    """Without positions, cross-attention is correct if some ranks have as many queries as keys."""
    ranks.run(cross_attention, *METHODS[method])


@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (LENGTH, LENGTH_K)])
@pytest.mark.parametrize("method", METHODS)
def test_positions_as_tensors(method, lengths, ranks):
    """Positions given as one tensor, or as one each for queries and keys, act like Shardings."""
    queries = shardings(4, lengths[0])
    both = queries, queries if lengths[0] == lengths[1] else shardings(3, lengths[1])
    ranks.run(positions_as_tensors, *METHODS[method], both)
