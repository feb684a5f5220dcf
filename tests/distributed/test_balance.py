"""Shardings that balance the work of the ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from mask_cases import MASKS

from fused_attn import masks
from fused_attn.distributed import Sharding, balanced_sharding
from fused_attn.distributed.balance import imbalance, work_of_ranks
from fused_attn.distributed.plan import plan_of
from fused_attn.distributed.sharding import MAX_RUNS
from fused_attn.distributed.visible_keys import VisibleKeys
from fused_attn.masks.spec import spec_of_mask

LENGTH, LONGEST = 2**20, 2**17  # tokens of a sequence and of the longest document (Llama 3.1)
LIMIT = 1.05  # largest work of a rank, relative to the mean of all ranks


def document_lengths(length, median, sigma, seed):
    """Return random document lengths, log-normal like file sizes (Downey 2001)."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(median), sigma, size=length).clip(1, LONGEST).astype(int)
    ends = np.cumsum(drawn)
    count = int(np.searchsorted(ends, length)) + 1
    drawn[count - 1] -= ends[count - 1] - length
    return torch.from_numpy(drawn[:count])


def packed_documents(lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return masks.causal() & masks.documents(ids[None])


def visible_keys(mask, length, batch=1):
    shape = batch, 1, length, length
    return VisibleKeys(spec_of_mask(mask, *shape, torch.device("cpu")), shape)


def work_of(mask, length, batch=1):
    return visible_keys(mask, length, batch).work


@pytest.mark.parametrize(
    ("ranks", "median", "sigma"), [(128, 1000, 1.5), (128, 2000, 1.8), (512, 600, 1.2)]
)
def test_packed_causal_documents_are_balanced(ranks, median, sigma):
    mask = packed_documents(document_lengths(LENGTH, median, sigma, seed=ranks))
    work = work_of(mask, LENGTH)
    sharding = balanced_sharding(mask, LENGTH, ranks)
    assert imbalance(work, sharding) <= LIMIT < 2 < imbalance(work, Sharding.zigzag(LENGTH, ranks))
    assert {sharding.rows(rank) for rank in range(ranks)} == {LENGTH // ranks}
    assert max(map(len, sharding.runs)) <= 64


@pytest.mark.parametrize("ranks", [8, 32, 128, 512])
def test_zigzag_for_causal_masks_and_contiguous_for_windows(ranks):
    causal = balanced_sharding(masks.causal(), LENGTH, ranks)
    assert causal == Sharding.zigzag(LENGTH, ranks)
    for mask in (None, masks.sliding_window(1024)):
        assert balanced_sharding(mask, LENGTH, ranks) == Sharding.contiguous(LENGTH, ranks)


def test_packed_sequences_are_balanced_like_documents():
    lengths = document_lengths(2**16, 300, 1.5, seed=1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    packed = balanced_sharding(None, 2**16, 16, is_causal=True, cu_seqlens=starts)
    assert packed == balanced_sharding(packed_documents(lengths), 2**16, 16)
    assert imbalance(work_of(packed_documents(lengths), 2**16), packed) <= LIMIT


def test_work_is_summed_over_the_batch():
    generator = np.random.default_rng(3)
    lengths = torch.from_numpy(generator.integers(100, 4096, 6))
    mask = masks.causal() & masks.padding(lengths)
    sharding = balanced_sharding(mask, 4096, 8, batch=6)
    work = torch.minimum(torch.arange(4096) + 1, lengths[:, None]).sum(0)
    assert torch.equal(work, work_of(mask, 4096, batch=6))
    assert imbalance(work, sharding) <= LIMIT


def test_work_with_key_masks_and_dense_masks():
    seen = torch.arange(512) % 7 < 3
    mask = masks.causal() & masks.dense(seen[None, None, None])
    dense = seen & torch.ones(512, 512, dtype=torch.bool).tril()
    assert torch.equal(work_of(mask, 512), dense.sum(1))
    some = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.3
    some[:, 256:] = False
    assert torch.equal(work_of(masks.dense(some), 512), some.sum(1))


PARTITIONS = [
    *itertools.product([0, 1, 5, 61, 4096, 4999], ["window"]),
    *itertools.product([509], MASKS),
]


@pytest.mark.parametrize(("length", "name"), PARTITIONS)
def test_every_position_has_one_rank(length, name):
    """Ranks get sorted runs, and row counts that differ by at most chunk_size.

    The constructor of Sharding checks that the runs contain each position once. Without chunk_size,
    the row counts differ by at most length / ranks.
    """
    mask = MASKS[name](2, 4, length, length)
    for ranks, chunk_size in ((1, None), (3, None), (8, None), (3, 8), (8, 24)):
        if chunk_size is not None and -(-length // (chunk_size * ranks)) > MAX_RUNS:
            continue
        sharding = balanced_sharding(
            mask, length, ranks, batch=2, num_heads=4, chunk_size=chunk_size
        )
        rows = [sharding.rows(rank) for rank in range(ranks)]
        assert (sharding.length, sharding.ranks) == (length, ranks)
        assert max(rows) - min(rows) <= (chunk_size or max(length // ranks, 1))
        starts = [[run.start for run in runs] for runs in sharding.runs]
        assert starts == list(map(sorted, starts))
        if chunk_size is not None or length >= 16 * 64 * ranks:
            assert not any(start % 8 for start in itertools.chain(*starts))


def test_keys_of_the_same_document_stay_together():
    """Ranks receive fewer than 70 % of the keys that they would with a sharding by work only."""
    lengths = document_lengths(2**16, 1000, 1.5, seed=4)
    mask = packed_documents(lengths)
    visible = visible_keys(mask, 2**16)

    def received(sharding):
        plans = [plan_of(sharding, sharding, rank, visible) for rank in range(16)]
        return sum(len(rows) for plan in plans for step in plan.steps[1:] for rows in step.wanted)

    order = visible.work.view(-1, 256).sum(1).argsort(descending=True, stable=True)
    by_work = [[range(c * 256, (c + 1) * 256) for c in order[r::16].sort()[0].tolist()]
               for r in range(16)]  # fmt: skip
    assert received(balanced_sharding(mask, 2**16, 16)) < 0.7 * received(Sharding(by_work))


SCRIPT = """
import torch
from fused_attn import masks
from fused_attn.distributed import balanced_sharding
ids = (torch.arange(30000).float().sqrt() * 3).long() // 17
mask = masks.causal() & masks.documents(ids[None])
result = str([[(r.start, r.stop) for r in own] for own in balanced_sharding(mask, 30000, 24).runs])
"""


def test_all_processes_compute_the_same_sharding():
    """The sharding does not depend on the hash seed or the number of threads."""
    here = {}
    exec(SCRIPT, here)  # with the default number of threads
    command = [sys.executable, "-c", f"{SCRIPT}\nprint(result)"]
    env = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == here["result"] and "(0, " in here["result"]


def test_time_for_a_million_positions():
    """Balancing a million positions takes less time than 40 million Python additions (2 to 3 s)."""
    mask = packed_documents(document_lengths(LENGTH, 1000, 1.5, seed=0))
    ratios = []
    for _ in range(3):
        begin = time.thread_time()
        balanced_sharding(mask, LENGTH, 512)
        middle = time.thread_time()
        sum(step & 7 for step in range(5_000_000))
        ratios.append((middle - begin) / (time.thread_time() - middle))
    assert min(ratios) < 8, ratios


def test_work_of_ranks():
    work = torch.arange(8)
    assert work_of_ranks(work, Sharding.zigzag(8, 2)).tolist() == [0 + 1 + 6 + 7, 2 + 3 + 4 + 5]
    assert imbalance(work, Sharding.contiguous(8, 2)) == 22 / 14
    assert imbalance(work * 0, Sharding.contiguous(8, 2)) == 1


def test_errors():
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        balanced_sharding(None, 8, 0)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        balanced_sharding(None, -1, 2)
    with pytest.raises(ValueError, match=r"chunk_size must be at least 2 .*got 1"):
        balanced_sharding(None, 1024, 2, chunk_size=1)
    with pytest.raises(ValueError, match="query_ids"):
        balanced_sharding(masks.documents(torch.zeros(1, 9, dtype=torch.int64)), 8, 2)
