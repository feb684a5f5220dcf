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
TYPES = torch.float32, torch.bfloat16
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
    queries = shardings(number, lengths[0])
    keys = queries if lengths[0] == lengths[1] else shardings(number + 1, lengths[1])
    return Case(*METHODS[method], (queries, keys), mask, enable_gqa=True, **options)


def sharded_case(method, sharding, mask, **options):
    return Case(*METHODS[method], (sharding, sharding), mask, enable_gqa=True, **options)


def random_inputs(dtype=torch.float32):
    """Return the tensors that `run_on_rank` takes, and random gradients of out and lse."""
    tensors = random_qkv(BATCH, HEADS, HEADS_KV, LENGTH, LENGTH, HEAD_DIM)
    given = [*(t.to(dtype) for t in tensors.values()), None]
    return given, torch.randn_like(given[0]), torch.randn(given[0].shape[:3])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name, method, ranks):
    number = list(MASKS).index(name)
    dtype = TYPES[(number + list(METHODS).index(method)) % 2]
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
    method = list(METHODS)[number % 3]
    assert_right(ranks, case_of(method, number, mask & other), TYPES[number % 2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [(10, 3), (0, 0)])
def test_ranks_without_visible_keys(lengths, method, ranks):
    """Results are correct if visible keys are on the first rank only, or on no rank."""
    mask = masks.padding(torch.tensor(lengths), torch.tensor(lengths))
    case = sharded_case(method, Sharding.contiguous(LENGTH, RANKS), mask)
    assert_right(ranks, case, torch.bfloat16)


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_masked_keys_has_no_effect(method, ranks):
    lengths = torch.tensor([LENGTH - 20, LENGTH - 7])
    given, *grads = random_inputs()
    for b, length in enumerate(lengths.tolist()):
        given[1][b, :, length:] = float("nan")
        given[2][b, :, length:] = float("inf")
    case = case_of(method, 0, masks.padding(lengths))
    for grads_or_none in ((None, None), grads):
        for result in ranks.run(run_on_rank, case, given, *grads_or_none):
            for name, tensor in result.items():
                assert tensor.isfinite().all(), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FIELDS)
def test_queries_and_keys_of_different_lengths(name, method, ranks):
    lengths, dtype = (LENGTH, LENGTH_K), (torch.float64, torch.bfloat16)[FIELDS.index(name) % 2]
    case = case_of(method, list(MASKS).index(name), MASKS[name](BATCH, HEADS, *lengths), lengths)
    assert_right(ranks, case, dtype, None, lengths, head_dim_v=8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "per_head"),
    [((1, 1), True), ((LENGTH, LENGTH), True), ((LENGTH, LENGTH), False), ((1, LENGTH), False),
     ((LENGTH, 1), True)],
)  # fmt: skip
def test_gradient_of_a_bias(shape, per_head, method, ranks):
    """The sum of the ranks' bias gradients equals the gradient of one process."""
    sizes = (BATCH, HEADS, *shape) if per_head else shape
    bias = torch.randn(sizes, generator=drawn(1))
    case = case_of(method, sum(shape), MASKS["causal"](BATCH, HEADS, LENGTH, LENGTH))
    assert_right(ranks, case, TYPES[per_head], bias)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", range(5))
def test_dropout(number, method, ranks):
    """A sharded call drops the same weights as one process, regardless of shard boundaries."""
    softcap = 5.0 if number in (2, 3) else None
    mask = MASKS["window"](BATCH, HEADS, LENGTH, LENGTH)
    case = case_of(method, number, mask, dropout_p=0.3, seed=SEED, softcap=softcap)
    assert_right(ranks, case, TYPES[number % 2])


@pytest.mark.parametrize("method", METHODS)
def test_dropout_with_a_prefix(method, ranks):
    mask, sharding = masks.prefix_lm(torch.tensor([20, 5])), Sharding.of_lengths([16, 24, 8, 13])
    case = sharded_case(method, sharding, mask, dropout_p=0.3, seed=SEED)
    assert_right(ranks, case, torch.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [None, "causal", "window", "prefix", "alibi", "dense"])
def test_packed_sequences(name, method, ranks):
    number, ends = len(name or ""), torch.tensor([0, 0, 7, 30, LENGTH])
    sizes = len(ends) - 1, HEADS, 31, 31
    mask = None if name is None else MASKS[name](*sizes)
    dropout = {} if name == "prefix" else {"dropout_p": 0.2, "seed": SEED}
    case = case_of(method, number, mask, cu_seqlens_q=ends, is_causal=name is None, **dropout)
    assert_right(ranks, case, TYPES[number % 2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("ragged", torch.bfloat16, {"dropout_p": 0.1, "seed": 3}),
        ("causal", torch.float32, {}),
    ],
    ids=["ragged", "causal"],
)
def test_repeated_runs(name, dtype, options, method, ranks):
    """Results are bitwise identical in every run, with any number of steps in flight."""
    case = case_of(method, 3, MASKS[name](BATCH, HEADS, LENGTH, LENGTH), **options)
    inputs = case, *random_inputs(dtype)
    expected = ranks.run(run_on_rank, *inputs)
    for results in (
        ranks.run(run_on_rank, *inputs),
        ranks.run(run_ahead, 1, *inputs),
        ranks.run(run_ahead, 2, *inputs),
    ):
        for got, want in zip(results, expected, strict=True):
            assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("method", METHODS)
def test_masks_that_share_a_tensor(method, ranks):
    """The plan of a narrow mask is not reused for a wide one with the same tensor."""
    documents, given = masks.documents(torch.arange(LENGTH) // 30), random_inputs()[0]
    sharding = Sharding.contiguous(LENGTH, RANKS)
    cases = [
        sharded_case(method, sharding, documents & band)
        for band in (masks.sliding_window(4, 0), masks.causal())
    ]
    for results in ranks.run(run_both_on_rank, cases, given):
        for case, got in zip(cases, results, strict=True):
            expected = case.in_one_process(*given)[0]
            rows = expected.index_select(2, sharding.positions(got["rank"]))
            torch.testing.assert_close(got["out"], rows)


def test_second_derivatives_are_an_error(ranks):
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
