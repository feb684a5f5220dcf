"""On CPUs, a sequence's results are bitwise identical in different batches and alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import drawn, short, use_isa, use_threads
from torch import Tensor

import fused_attn
from fused_attn import masks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGE = 32
# With AMX, up to this many queries may run on vector units, which round differently.
LONGEST_OF_VECTORS = 32


class Case:
    """Random decoding step of a batch, whose sequences can also be decoded one by one."""

    def __init__(self, seed: int) -> None:
        choose, self.generator = random.Random(seed), drawn(seed)
        self.dtype = choose.choice(DTYPES)
        self.seqlen_q = choose.choice([1, 1, 2, 3, 4])
        num_heads_kv, group = choose.choice([1, 2, 4]), choose.choice([1, 1, 2, 4, 8])
        self.num_heads, self.dim = num_heads_kv * group, choose.choice([64, 128])
        self.mask = choose.choice(["none", "window", "alibi", "window and alibi"])
        self.paged, self.softcap = choose.random() < 0.4, choose.choice([None, None, 5.0])
        batch = choose.randint(2, 9)
        longest = choose.choice([70, 400, 1500])
        self.lengths = [choose.randint(self.seqlen_q, longest) for _ in range(batch)]
        self.window = choose.choice([20, 200])
        rooms = -(-max(self.lengths) // PAGE) * PAGE
        self.query = self.random(batch, self.num_heads, self.seqlen_q)
        # Cache rows after the end of a sequence are 0 or NaN, and do not affect the results.
        self.caches = [self.random(batch, num_heads_kv, rooms) for _ in range(2)]
        for cache in self.caches:
            for b, length in enumerate(self.lengths):
                cache[b, :, length:] = choose.choice([0.0, float("nan")])

    def __str__(self) -> str:
        paged = "paged" if self.paged else "contiguous"
        shape = f"H{self.num_heads} Q{self.seqlen_q} D{self.dim} {short(self.dtype)}"
        return f"{shape} {paged}, {self.mask}, softcap {self.softcap}, {self.lengths}"

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.dim, generator=self.generator).to(self.dtype)

    def decode(self, sequences: list[int], num_threads: int) -> list[Tensor]:
        """Return out and lse of some sequences, decoded as one batch."""
        lengths = [self.lengths[b] for b in sequences]
        query, *caches = (x[sequences] for x in (self.query, *self.caches))
        table = None
        if self.paged:
            pages = caches[0].shape[2] // PAGE
            table = torch.randperm(len(lengths) * pages, generator=self.generator)
            order = table.argsort()
            # (batch, heads, pages * PAGE, dim) to (batch * pages, heads, PAGE, dim)
            caches = [
                x.unflatten(2, (pages, PAGE)).transpose(1, 2).flatten(0, 1)[order].contiguous()
                for x in caches
            ]
            table = table.view(len(lengths), pages)
        else:
            caches = [x[:, :, : max(lengths)].contiguous() for x in caches]
        with use_threads(num_threads):
            return list(
                fused_attn.decode_attention(
                    query, *caches, cache_lengths=lengths, block_table=table, backend="cpp",
                    attn_mask=self.attn_mask(), softcap=self.softcap, return_lse=True,
                )
            )  # fmt: skip

    def attn_mask(self) -> masks.Mask | None:
        window = masks.sliding_window(self.window, 0, align="bottom_right")
        alibi = masks.alibi(2.0 ** -torch.arange(1.0, self.num_heads + 1))
        known = {"none": None, "window": window, "alibi": alibi, "window and alibi": window & alibi}
        return known[self.mask]


def check(seed: int) -> None:
    """Assert that out and lse of a batch, a part of it and each sequence are bitwise identical."""
    case = Case(seed)
    every = list(range(len(case.lengths)))
    batch = case.decode(every, 1)
    some = every[:: 2 if len(every) > 3 else 1]
    for sequences, threads in [(every, 2), (some, 2), *(([b], 1) for b in every)]:
        part = case.decode(sequences, threads)
        for name, one, other in zip(("out", "lse"), batch, part, strict=True):
            assert torch.equal(one[sequences], other), f"{name} of {sequences}: {case}"


@pytest.mark.parametrize("first", range(0, 30, 5))
def test_decoding(first, isa):
    for seed in range(first, first + 5):
        check(seed)


def results(call: Callable[..., Tensor], *tensors: Tensor) -> dict[str, Tensor]:
    """Return outputs without and with gradients, and gradients, of call(query, key, value).

    Args:
        tensors: query, key, value and the output gradient.
    """
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    out = call(*leaves)
    with torch.no_grad():
        inferred = call(*leaves)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    return dict(zip(("no_grad", "out", "dQ", "dK", "dV"), (inferred, out, *grads), strict=True))


def check_prefill(lengths: list[int], dim: int, dtype: torch.dtype) -> None:
    """Assert that sequences give bitwise identical results in a padded batch and alone.

    With fewer than 8 heads, the backward would split the keys, which changes the rounding of dQ.
    """
    shape = len(lengths), 8, max(lengths), dim
    tensors = [torch.randn(shape, generator=drawn(i)).to(dtype) for i in range(4)]
    rows = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tensors[3] *= rows[:, None, :, None]  # padded rows have no gradient

    attend = partial(fused_attn.scaled_dot_product_attention, backend="cpp")
    mask = masks.causal() & masks.padding(torch.tensor(lengths))
    batch = results(partial(attend, attn_mask=mask), *tensors)
    for b, length in enumerate(lengths):
        rows = slice(b, b + 1), slice(None), slice(length)
        alone = results(partial(attend, attn_mask=masks.causal()), *(t[rows] for t in tensors))
        for name in batch:
            assert torch.equal(batch[name][rows], alone[name]), f"{name} of {b}: {lengths}"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("lengths", [[5, 9, 40], [17, 64, 33], [700, 640, 515]], ids=str)
def test_prefill_and_gradients(lengths, dtype, isa):
    if min(lengths) <= LONGEST_OF_VECTORS and isa.startswith("amx"):
        pytest.skip("reason: with AMX, short sequences run on vector units")
    check_prefill(lengths, 64, dtype)


def check_packed(lengths_q: list[int], lengths_k: list[int], dim: int, dtype: torch.dtype) -> None:
    """Assert that sequences with 8 heads give bitwise identical results packed and alone."""
    ends_q, ends_k = (torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k))
    rows = [sum(lengths_q), sum(lengths_k), sum(lengths_k), sum(lengths_q)]
    tensors = [torch.randn(n, 8, dim, generator=drawn(i)).to(dtype) for i, n in enumerate(rows)]

    def run(first: int, last: int) -> dict[str, Tensor]:
        """Return the results of sequences [first, last)."""
        own_q, own_k = (ends[first : last + 1] for ends in (ends_q, ends_k))
        rows = (slice(int(own[0]), int(own[-1])) for own in (own_q, own_k, own_k, own_q))
        attend = partial(
            fused_attn.varlen_attention,
            cu_seqlens_q=own_q - own_q[0], cu_seqlens_k=own_k - own_k[0],
            max_seqlen_q=max(lengths_q[first:last]), max_seqlen_k=max(lengths_k[first:last]),
            attn_mask=masks.causal("bottom_right"), backend="cpp",
        )  # fmt: skip
        return results(attend, *(x[of] for x, of in zip(tensors, rows, strict=True)))

    batch = run(0, len(lengths_q))
    for b in range(len(lengths_q)):
        for name, alone in run(b, b + 1).items():
            ends = ends_k if name in ("dK", "dV") else ends_q
            one = batch[name][ends[b] : ends[b + 1]]
            assert torch.equal(one, alone), f"{name} of {b}: {lengths_q}, {lengths_k}"


def test_packed_batch(isa):
    """Packed and single sequences give identical bits even if kernels prefetch the next head."""
    if isa.startswith("amx"):
        pytest.skip("reason: with AMX, short sequences run on vector units")
    lengths = [7, 120, 33, 1, 90, 64, 128, 100] * 6
    assert 4 * sum(lengths) * 8 * 32 * 4 > 2**20
    check_packed(lengths, lengths, 32, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_packed_prompts_and_decoding_steps(dtype, isa):
    """Packed and single sequences give identical bits even if they run on different kernels."""
    if isa.startswith("amx"):
        pytest.skip("reason: with AMX, short sequences run on vector units")
    lengths_q, lengths_k = [1, 40, 1, 8, 3, 17, 2, 1, 16], [300, 40, 1, 20, 3, 90, 500, 70, 16]
    check_packed(lengths_q, lengths_k, 64, dtype)


def test_packed_batch_on_the_default_kernels():
    """With AMX, float32 sequences of at most 256 tokens run on vector units, in any batch."""
    lengths = [7, 300, 33, 1, 256, 90, 257, 100]
    with use_isa(""):
        check_packed(lengths, lengths, 64, torch.float32)


@pytest.mark.thorough
def test_decoding_at_random(isa):
    for seed in range(1000, 1200):
        check(seed)


@pytest.mark.thorough
def test_prefill_at_random(isa):
    shortest = LONGEST_OF_VECTORS + 1 if isa.startswith("amx") else 5
    for seed in range(200):
        choose = random.Random(seed)
        longest = choose.choice([shortest + 20, 200, 800])
        lengths = [choose.randint(shortest, longest) for _ in range(choose.randint(2, 6))]
        check_prefill(lengths, choose.choice([32, 64, 80, 128]), choose.choice(DTYPES))


@pytest.mark.thorough
def test_packed_at_random(isa):
    shortest = LONGEST_OF_VECTORS + 1 if isa.startswith("amx") else 1
    for seed in range(200):
        choose = random.Random(seed)
        lengths_q = [shortest + choose.choice([0, 1, 4, 7, 8, 15, 16, 39, 99]) for _ in range(5)]
        lengths_k = [n + choose.choice([0, 0, 3, 50, 300, 700]) for n in lengths_q]
        check_packed(lengths_q, lengths_k, choose.choice([32, 64, 80]), choose.choice(DTYPES))
