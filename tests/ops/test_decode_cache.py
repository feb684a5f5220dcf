"""decode_attention: attention to a KV cache, and the update of the cache."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    ONE_16_BIT_TYPE,
    assert_outputs_like_eager,
    device_of,
    random_qkv,
    short,
)
from mask_cases import MASKS, OTHER_MASKS

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import cpp, get_backend
from fused_attn.call import handlers
from fused_attn.ops import decode_step

CAPACITY, PAGE = 304, 16
# Number of new positions -> cache lengths before the step, after which the last cache is full.
LENGTHS = {0: (0, 37, CAPACITY), 1: (0, 37, CAPACITY - 1), 19: (0, 37, CAPACITY - 19)}
LAYOUTS = ["whole", "pages", "transposed"]
KERNELS_OF_CACHES = [
    name for name in BACKENDS if "attention_decode" in vars(type(get_backend(name)))
]


class Cache:
    """KV cache of some sequences, with NaN at positions that belong to no sequence.

    Args:
        key, value: (batch, num_heads_kv, CAPACITY, dim). Sequence b consists of the first
            lengths[b] + new rows, of which the last `new` are not in the cache yet.
    """

    def __init__(self, key, value, lengths, new, layout):
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=key.device)
        self.table = None
        position = torch.arange(CAPACITY, device=key.device)
        inside = position < self.lengths[:, None]
        late = inside.logical_not() & (position < self.lengths[:, None] + new)
        self.tensors, self.expected, self.new = [], [], []
        for full in (key, value):
            first = full.masked_fill(~inside[:, None, :, None], torch.nan)
            both = torch.where(late[:, None, :, None], full, first)
            rows = full.transpose(1, 2)[late].unflatten(0, (-1, new)) if new else None
            self.new.append(rows.transpose(1, 2).contiguous() if new else None)
            self.tensors.append(self._laid_out(first, layout))
            self.expected.append(self._laid_out(both, layout))

    def _laid_out(self, full, layout):
        if layout == "whole":
            return full.contiguous()
        if layout == "transposed":
            return full.transpose(1, 2).contiguous().transpose(1, 2)
        batch, heads, _, dim = full.shape
        pages = full.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
        order = torch.randperm(len(pages) + 2, generator=torch.Generator().manual_seed(0))
        order = order[: len(pages)].to(full.device)
        self.table = order.view(batch, -1).int()
        shuffled = full.new_full((len(pages) + 2, heads, PAGE, dim), torch.nan)
        shuffled[order] = pages
        starts = torch.arange(self.table.shape[1], device=full.device) * PAGE
        self.table[starts >= self.lengths[:, None] + 19] = -(10**6)  # unused entries
        return shuffled

    def attend(self, query, mask, backend, **options):
        key, value = self.new
        return fused_attn.decode_attention(
            query, *self.tensors, cache_lengths=self.lengths, key=key, value=value,
            block_table=self.table, attn_mask=mask, return_lse=True, backend=backend, **options,
        )  # fmt: skip

    def assert_updated(self):
        """Assert that the cache contains the new rows, and that all other rows are unchanged."""
        torch.testing.assert_close(self.tensors, self.expected, rtol=0, atol=0, equal_nan=True)


def cached(lengths, new, layout, mask=None, **options):
    """Return function(backend)(query, key, value) for `assert_outputs_like_eager`.

    The eager reference attends to key and value without a cache.
    """

    def of(backend):
        def call(query, key, value):
            moved = None if mask is None else mask.to(query.device)
            if backend != "eager":
                cache = Cache(key, value, lengths, new, layout)
                results = cache.attend(query, moved, backend, **options)
                cache.assert_updated()
                return results
            ends = torch.tensor(lengths).view(-1, 1, 1, 1) + new
            visible = masks.padding(ends.flatten())
            visible = visible if moved is None else moved & visible
            rest = dict(options)
            if rest.pop("is_causal", True):  # not causal(): its diagonal depends on the padding
                rows = ends - query.shape[2] + torch.arange(query.shape[2]).view(-1, 1)
                visible &= masks.dense(torch.arange(key.shape[2]) <= rows)
            return F.scaled_dot_product_attention(
                query, key, value, visible, enable_gqa=True, return_lse=True, backend="eager",
                **rest,
            )  # fmt: skip

        return call

    return of


def check_cached(shape, new, layout, dtype, backend, mask=None, **options):
    """Check decoding for a shape (num_heads, num_heads_kv, seqlen_q, head_dim, head_dim_v)."""
    num_heads, num_heads_kv, seqlen_q, *dims = shape
    tensors = random_qkv(3, num_heads, num_heads_kv, seqlen_q, CAPACITY, *dims)
    function = cached(LENGTHS[new], new, layout, mask, **options)
    assert_outputs_like_eager(function, tensors, dtype, backend)


@ONE_16_BIT_TYPE
@pytest.mark.thinned("covered by pages", layout=["whole", "transposed"])
@pytest.mark.thinned("covered in float32", new=[0, 19], dtype=[torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new", LENGTHS)
def test_cache(new, layout, dtype, backend):
    # Head dims that are multiples of a vector, and others; one query tile, and several.
    for shape in ((4, 2, 1, 40, 24), (4, 2, 19, 64, 64), (1, 1, 3, 36, 5)):
        check_cached(shape, new, layout, dtype, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new", LENGTHS)
def test_cache_of_the_reference(new, layout):
    query, key, value = random_qkv(3, 4, 2, 3, CAPACITY, 8).values()
    cache = Cache(key, value, LENGTHS[new], new, layout)
    results = cache.attend(query, None, "eager")
    expected = cached(LENGTHS[new], new, layout)("eager")(query, key, value)
    torch.testing.assert_close(results, expected)


@OTHER_MASKS
@ONE_16_BIT_TYPE
@pytest.mark.thinned(
    "covered without a cache", name=set(MASKS) - {"window", "padding", "dense_full", "bits"}
)
@pytest.mark.thinned("covered without a cache", name=["window", "padding"], dtype=[torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_caches(name, dtype, backend):
    mask = MASKS[name](3, 4, 5, CAPACITY)
    check_cached((4, 2, 5, 32, 32), 19, "pages", dtype, backend, mask)
    check_cached((4, 2, 5, 32, 32), 1, "whole", dtype, backend, mask, is_causal=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_of_caches(backend):
    window = masks.sliding_window(30, align="bottom_right")
    options = {"softcap": 3.0, "scale": 0.2}
    check_cached((4, 1, 2, 128, 96), 1, "pages", torch.float32, backend, window, **options)


@pytest.mark.parametrize("backend", KERNELS_OF_CACHES)
def test_kernels_read_pages_in_place(backend, monkeypatch):
    """Decode kernels append the new rows and read the pages without copies."""
    for name in ("append", "contiguous_rows"):
        monkeypatch.setattr(decode_step, name, mock.Mock(side_effect=AssertionError(name)))
    tensors = random_qkv(3, 4, 2, 2, CAPACITY, 64)
    query, key, value = (t.to(device_of(backend), torch.bfloat16) for t in tensors.values())
    cache = Cache(key, value, LENGTHS[1], 1, "pages")
    versions = [t._version for t in cache.tensors]
    cache.attend(query, None, backend)
    assert [t._version for t in cache.tensors] == [v + 1 for v in versions]


def test_backends_are_selected_by_the_capacity_of_the_cache(monkeypatch):
    """The seqlen_k of a problem is the capacity of the cache, not the size of a page."""
    problems = []
    monkeypatch.setattr(decode_step, "select", lambda problem, _: problems.append(problem))
    monkeypatch.setattr(decode_step, "_attend", lambda *_: (None, None))
    query, key, value = random_qkv(3, 4, 2, 2, CAPACITY, 64).values()
    for layout in ("whole", "pages"):
        Cache(key, value, LENGTHS[1], 1, layout).attend(query, masks.sliding_window(9), None)
    assert [p.seqlen_k for p in problems] == [CAPACITY, CAPACITY]


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts_of_pages(dtype, spare):
    """Pages ordered by token and then by head, as in flash-attn, give bitwise equal results."""
    key, value = (torch.randn(7, 2, 16, 8).to(dtype) for _ in range(2))
    table = torch.tensor([[6, 2, 0], [3, 6, 5]])  # two sequences share a page
    table = torch.cat([table, table.new_full((2, spare), -1)], 1)
    query = torch.randn(2, 4, 1, 8).to(dtype)
    rows = [t[table[:, :3]].transpose(1, 2).flatten(2, 3) for t in (key, value)]
    expected = fused_attn.decode_attention(query, *rows, cache_lengths=[48, 33])
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value)]
    for pages in ((key, value), by_token):
        got = fused_attn.decode_attention(query, *pages, cache_lengths=[48, 33], block_table=table)
        assert torch.equal(got, expected)


def test_too_long_caches_are_refused():
    long = torch.zeros(1, 1, 1, 8).expand(1, 1, 1 << 29, 8)
    with pytest.raises(ValueError, match="seqlen below"):
        fused_attn.decode_attention(torch.zeros(1, 1, 1, 8), long, long, cache_lengths=[1 << 29])


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_decoding_step_by_step(backend):
    """Prefill and decoding steps match the rows of one causal call if lengths change in place."""
    tensors = random_qkv(2, 4, 2, 24, 24, 16)
    query, key, value = (t.to(device_of(backend)) for t in tensors.values())
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    caches = [torch.full((2, 2, 40, 16), torch.nan, device=key.device) for _ in range(2)]
    lengths = torch.zeros(2, dtype=torch.int64, device=key.device)
    mask = masks.sliding_window(30, align="bottom_right")
    for rows in (slice(0, 20), slice(20, 21), slice(21, 22), slice(22, 24)):
        out = fused_attn.decode_attention(
            query[:, :, rows], *caches, cache_lengths=lengths, key=key[:, :, rows],
            value=value[:, :, rows], attn_mask=mask, backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[:, :, rows])
        lengths += out.shape[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("layout", ["whole", "transposed"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("new", [0, 1, 19])
@pytest.mark.parametrize("given", [(0, 0), (37, 37), (0, 37), (120, 90)], ids=str)
def test_small_steps(given, new, is_causal, layout, dtype):
    """Small decoding steps without `backend=`, which may skip validation, match the reference."""
    tensors = random_qkv(2, 4, 2, max(new, 1), CAPACITY, 32, 20)

    def of(backend):
        def call(query, key, value):
            cache = Cache(key, value, given, new, layout)
            lengths = cache.lengths.tolist() if new == 1 else cache.lengths
            versions = [t._version for t in cache.tensors]
            out = fused_attn.decode_attention(
                query, *cache.tensors, cache_lengths=lengths, key=cache.new[0], value=cache.new[1],
                is_causal=is_causal, scale=0.3, backend=None if backend == "cpp" else backend,
            )  # fmt: skip
            cache.assert_updated()
            if new > 0:
                assert all(t._version > v for t, v in zip(cache.tensors, versions, strict=True))
            return (out,)

        return call

    assert_outputs_like_eager(of, tensors, dtype, "cpp")


@pytest.mark.parametrize("lengths", [[], (), torch.zeros(0, dtype=torch.int32)], ids=repr)
def test_no_sequences(lengths):
    query, cache = torch.randn(0, 2, 1, 16), torch.randn(0, 2, 8, 16)
    out = fused_attn.decode_attention(query, cache, cache, cache_lengths=lengths)
    assert out.shape == query.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_in_inference_mode(backend):
    with torch.inference_mode():
        check_cached((4, 2, 2, 64, 64), 19, "pages", torch.float32, backend)


def test_compiled_caches():
    tensors = random_qkv(2, 4, 2, 2, CAPACITY, 16)

    def step(cache, query):
        return cache.attend(query, None, None)

    caches = [Cache(tensors["key"], tensors["value"], (5, 40), 19, "pages") for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [f(c, tensors["query"]) for f, c in zip((step, compiled), caches, strict=True)]
    torch.testing.assert_close(*results)
    caches[1].assert_updated()


def _arguments(**changes):
    cache, new = torch.zeros(2, 2, 40, 8), torch.zeros(2, 2, 3, 8)
    arguments = {
        "query": torch.zeros(2, 4, 3, 8), "key_cache": cache, "value_cache": cache.clone(),
        "cache_lengths": torch.tensor([5, 6]), "key": new, "value": new,
    }  # fmt: skip
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None}, "given together, got only key"),
        ({"key": torch.zeros(2, 2, 3, 4)}, r"key must have shape \(2, 2, 3, 8\), got"),
        ({"value": torch.zeros(2, 2, 2, 8)}, r"value must have shape \(2, 2, 3, 8\), got"),
        ({"query": torch.zeros(2, 4, 3)}, "query must have 4 dimensions"),
        ({"query": torch.zeros(2, 3, 3, 8)}, "must divide num_heads of query, 3"),
        ({"query": torch.zeros(1, 4, 3, 8)}, r"key must have shape \(1, 2, 3, 8\), got"),
        (
            {"query": torch.zeros(1, 4, 3, 8), "key": None, "value": None},
            "key_cache must have batch 1",
        ),
        ({"value_cache": torch.zeros(2, 2, 41, 8)}, "value_cache must have shape"),
        ({"key_cache": torch.zeros(2, 2, 40, 8).half()}, "key_cache must have dtype"),
        ({"key_cache": torch.zeros(1, 2, 40, 8).expand(2, -1, -1, -1)}, "must not be an expanded"),
        ({"query": torch.zeros(2, 4, 3, 8, requires_grad=True)}, "query must not require grad"),
        ({"attn_mask": torch.zeros(3, 40, requires_grad=True)}, "attn_mask must not require grad"),
        ({"attn_mask": torch.zeros(3, 41)}, "attn_mask must be broadcastable"),
        ({"cache_lengths": torch.tensor([5])}, r"cache_lengths must have shape \(2,\)"),
        ({"cache_lengths": [5, 38]}, r"cache_lengths must be in \[0, 37\] .*got \[5, 38\]"),
        ({"block_table": torch.zeros(3, 1).int()}, r"block_table must have shape \(2, max_pages\)"),
        ({"block_table": torch.tensor([[0], [2]])}, r"page indices in \[0, 2\) .* got 2"),
    ],
)  # fmt: skip
def test_errors_of_caches(changes, message):
    with pytest.raises(ValueError, match=message):
        fused_attn.decode_attention(**_arguments(**changes))


class Subclass(torch.Tensor):
    """Tensor subclass that overrides nothing."""


@pytest.mark.parametrize("kind", [torch.Tensor, Subclass])
def test_pages_are_checked_with_every_mask(kind):
    """An invalid page raises an error before anything is written, with a mask of any type."""
    arguments = _arguments(
        block_table=torch.tensor([[0, 1], [1, -1]]), attn_mask=torch.zeros(3, 80).as_subclass(kind),
        cache_lengths=[5, 40], key=torch.ones(2, 2, 3, 8),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"page indices in \[0, 2\) .* got -1"):
        fused_attn.decode_attention(**arguments)
    assert not arguments["key_cache"].any()


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("lengths", [[1, 1], [1, 3]])
def test_new_rows_may_be_a_view_of_the_cache(lengths, device):
    cache, query = torch.randn(2, 2, 40, 8), torch.randn(2, 2, 1, 8)
    new = cache[:, :, :3].clone()
    with torch.device(device) if device else contextlib.nullcontext():
        fused_attn.decode_attention(
            query, cache, cache.clone(), cache_lengths=lengths, key=cache[:, :, :3], value=new
        )
    for b, length in enumerate(lengths):
        assert torch.equal(cache[b, :, length : length + 3], new[b])


@pytest.mark.parametrize(
    ("lengths", "table"),
    [([-2, 5], None), ([3, 99], None), ([3, 5], [[0, 1], [-1, 1]]), ([3, 5], [[0, 1], [7, 1]])],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("seqlen_new", [0, 1])
def test_values_are_checked_within_modes(lengths, table, seqlen_new, device):
    """Lengths and page indices are checked under the mode that torch.set_default_device sets."""
    table = None if table is None else torch.tensor(table)
    query, caches = torch.randn(2, 2, 1, 8), torch.zeros(2, 2, 2, 20, 8)
    new = dict.fromkeys(("key", "value"), torch.ones(2, 2, 1, 8)) if seqlen_new else {}
    call = functools.partial(fused_attn.decode_attention, query, *caches, **new)
    lengths = torch.tensor(lengths)
    with pytest.raises(ValueError, match=r"must be in|page indices in"), torch.device(device):
        call(cache_lengths=lengths, block_table=table)
    assert not caches.any()
    with torch.device(device):
        out = call(cache_lengths=[3, 5], block_table=None if table is None else table.clamp(0, 1))
    assert out.shape == query.shape and caches.any() == bool(seqlen_new)


def test_caches_made_in_inference_mode_cannot_be_written_outside_of_it():
    query, new = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 3, 8)
    with torch.inference_mode():
        caches = torch.zeros(2, 1, 1, 40, 8).unbind()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        fused_attn.decode_attention(query, *caches, cache_lengths=[1], key=new, value=new)


@pytest.mark.parametrize("layout", ["whole", "transposed"])
def test_rows_appended_by_torch_and_by_the_module(layout, monkeypatch):
    """Results are bitwise equal whether torch or the compiled module appends the new rows."""
    tensors, results = random_qkv(3, 4, 2, 19, CAPACITY, 8), []
    for limit in (cpp._MAX_APPENDED, -1):
        monkeypatch.setattr(cpp, "_MAX_APPENDED", limit)
        cache = Cache(tensors["key"], tensors["value"], LENGTHS[19], 19, layout)
        results.append(cache.attend(tensors["query"], None, "cpp"))
        cache.assert_updated()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("attn_mask", [None, torch.zeros(3, 40)], ids=["plain", "masked"])
def test_stats_and_handlers_of_distributed_calls(attn_mask):
    """stats() does not count decoding steps, and a handler of distributed calls refuses them."""
    arguments = _arguments(attn_mask=attn_mask)
    with fused_attn.stats() as counts:
        fused_attn.decode_attention(**arguments)
    assert not counts.kinds
    before = arguments["key_cache"].fill_(3.0).clone()
    with handlers.handled_by(object()), pytest.raises(NotImplementedError, match="distributed"):
        fused_attn.decode_attention(**arguments)
    assert torch.equal(arguments["key_cache"], before)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_lengths": torch.zeros(2)}, {"cache_lengths": None}, {"cache_lengths": [[1], []]},
        {"block_table": torch.zeros(2, 1)}, {"key": 1, "value": 2},
    ],
    ids=str,
)  # fmt: skip
def test_types_of_caches(changes):
    with pytest.raises(TypeError, match=f"{next(iter(changes))} must be"):
        fused_attn.decode_attention(**_arguments(**changes))


@pytest.mark.parametrize("head_dim", [64, 300])
def test_rows_behind_shorter_sequences_do_not_matter(head_dim):
    """NaN in cache rows after the end of a sequence has no effect."""
    lengths, query = [5, 9], torch.randn(2, 4, 1, head_dim)
    caches = [torch.full((2, 4, 16, head_dim), torch.nan) for _ in "kv"]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, :, :length] = torch.randn(4, length, head_dim)
    key, value = torch.randn(2, 2, 4, 1, head_dim)
    out = fused_attn.decode_attention(query, *caches, cache_lengths=lengths, key=key, value=value)
    for b, length in enumerate(lengths):
        filled = [cache[b : b + 1, :, : length + 1] for cache in caches]
        want = F.scaled_dot_product_attention(query[b : b + 1], *filled, backend="eager")
        torch.testing.assert_close(out[b : b + 1], want, rtol=1e-5, atol=1e-5)
