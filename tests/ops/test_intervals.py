"""Masks as intervals of keys and as block lists, compared with dense masks and FlexAttention."""

import random
import time
from dataclasses import replace

import pytest
import torch
from mask_draws import OTHERS, STRUCTURED, drawn_mask, packed_problem, visible_of
from torch.nn.attention.flex_attention import create_block_mask

from fused_attn import masks
from fused_attn.masks.intervals import block_lists, intervals_of, unmasked_keys
from fused_attn.masks.spec import spec_of_mask

CPU, INF = torch.device("cpu"), float("inf")


def blocks_of(counts, indices, columns):
    """Check the format of block lists, and return a bool matrix that is True for listed blocks."""
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous() and indices.is_contiguous() and indices.shape[-1] == columns
    listed = torch.arange(columns) < counts[..., None]
    steps = indices.diff(dim=-1).masked_fill(~listed[..., 1:], 1)
    assert bool((steps > 0).all()), "indices must ascend"
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)


def check_blocks(intervals, visible, block_size, *, exact):
    """Compare block lists with create_block_mask; if not `exact`, more may be listed as partial."""
    batch, heads, seqlen_q, seqlen_k = visible.shape
    blocks = [-(-n // b) for n, b in zip((seqlen_q, seqlen_k), block_size, strict=True)]
    lists = block_lists(intervals, block_size)
    partial, full = (blocks_of(*lists[i : i + 2], blocks[1]) for i in (0, 2))
    for got, i in ((partial, 4), (full, 6)):
        assert torch.equal(blocks_of(*lists[i : i + 2], blocks[0]), got.mT)
    want = create_block_mask(
        lambda b, h, q, k: visible[b, h, q, k], batch, heads, seqlen_q, seqlen_k, "cpu", block_size
    )
    lists = want.kv_num_blocks, want.kv_indices, want.full_kv_num_blocks, want.full_kv_indices
    lists = [t.contiguous() for t in lists]
    some, every = (blocks_of(*lists[i : i + 2], blocks[1]) for i in (0, 2))
    assert not (partial & full).any()
    assert not ((some | every) & ~(partial | full)).any(), "a visible block is missing"
    if intervals.rest.bias is None:  # a bias also masks positions in full blocks
        assert not (full & ~every).any(), "a full block has a masked position"
    if exact:
        assert torch.equal(partial.expand(some.shape), some)
        assert torch.equal(full.expand(every.shape), every)


def elements_of(intervals, shape):
    """Return the visible positions, computed from intervals and remaining conditions."""
    key, rest, rows = torch.arange(intervals.seqlen_k), intervals.rest, intervals.rows
    inside = (key >= intervals.begin[..., None]) & (key < intervals.end[..., None])
    visible = inside[:, None]
    if rows is None:
        return visible & visible_of(rest, shape)
    index = [rows.sequence[:, None], rows.position[:, None], key - rows.first_key[:, None]]
    for tensor in (rest.dense, None if rest.bias is None else rest.bias != -INF):
        if tensor is not None:
            sizes = tensor.shape[0], *tensor.shape[2:]
            b, i, j = (t.clamp(0, n - 1) for t, n in zip(index, sizes, strict=True))
            visible = visible & tensor[b, :, i, j].permute(2, 0, 1)[None]
    return visible & visible_of(replace(rest, dense=None, bias=None), shape)


def check_intervals(number, spec, shape, visible, block_size):
    """Check intervals, block lists and unmasked keys of a mask against its dense mask."""
    intervals = intervals_of(spec, shape, CPU)
    assert torch.equal(elements_of(intervals, shape), visible), number
    check_blocks(intervals, visible, block_size, exact=intervals.exact)
    unmasked = unmasked_keys(intervals, 2).expand(shape[0], 2, -1)
    assert not (visible.any(2) & ~unmasked).any(), number
    return intervals, unmasked


@pytest.mark.sampled("covered by the first hundred masks", start=range(100, 600))
@pytest.mark.parametrize("start", range(0, 600, 100))
def test_structured_masks(start):
    """Intervals of random masks equal the dense mask, and block lists equal FlexAttention's."""
    for number in range(start, start + 100):
        draw = random.Random(-number)
        shape = (draw.choice([1, 2, 3]), 2, draw.randint(1, 150), draw.randint(1, 150))
        spec = spec_of_mask(drawn_mask(number, STRUCTURED, shape), *shape, torch.device("cpu"))
        visible = visible_of(spec, shape)
        block_size = draw.choice([(16, 16), (32, 16), (16, 32), (64, 64)])
        intervals, unmasked = check_intervals(number, spec, shape, visible, block_size)
        assert intervals.exact and torch.equal(unmasked, visible.any(2)), number


@pytest.mark.sampled("covered by the first hundred masks", start=range(100, 300))
@pytest.mark.parametrize("start", range(0, 300, 100))
def test_other_masks(start):
    """Block lists of dense tensors and shuffled documents include every visible block."""
    for number in range(start, start + 100):
        draw = random.Random(-number)
        shape = (draw.choice([1, 2]), 2, draw.randint(1, 100), draw.randint(1, 100))
        kinds = (*OTHERS, *draw.sample(STRUCTURED, 2))
        spec = spec_of_mask(drawn_mask(number, kinds, shape), *shape, torch.device("cpu"))
        block_size = draw.choice([(16, 16), (32, 16)])
        check_intervals(number, spec, shape, visible_of(spec, shape), block_size)


def test_packed_sequences():
    """Intervals and block lists of packed sequences agree with the dense mask of all rows."""
    for number in range(100):
        check_intervals(number, *packed_problem(number), (16, 16))


@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_long_sequences(kind):
    """Block lists of 32,768 tokens take less than 1 s, because no dense mask is created."""
    length = 32768
    mask = masks.causal()
    if kind == "documents":
        mask = mask & masks.documents(torch.arange(length)[None] // 700)
    shape = (1, 1, length, length)
    spec = spec_of_mask(mask, *shape, torch.device("cpu"))
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        lists = block_lists(intervals_of(spec, shape, CPU), (128, 128))
        seconds.append(time.perf_counter() - begin)
    full = int(lists.full_kv_num_blocks.sum())
    assert full == 256 * 255 // 2 if kind == "causal" else full < 256 * 4
    # Block lists take 6 ms; work quadratic in the length would exceed 1 s on any machine.
    assert min(seconds) < 1.0


def test_no_values_are_read():
    """On the meta device, no values are read, and documents are not assumed to be contiguous."""
    device = torch.device("meta")
    ids = torch.zeros(1, 64, dtype=torch.long, device=device)
    lengths = torch.empty(1, dtype=torch.long, device=device)
    mask = masks.causal() & masks.documents(ids) & masks.padding(lengths)
    shape = (1, 2, 64, 64)
    intervals = intervals_of(spec_of_mask(mask, *shape, device), shape, device)
    assert not intervals.exact
    assert block_lists(intervals, (16, 16)).kv_indices.shape == (1, 1, 4, 4)
    assert unmasked_keys(intervals, 1).device.type == "meta"
