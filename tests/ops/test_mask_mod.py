"""Masks from mask functions, BlockMasks and unions, and the structure recognized in them."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import fused_attn
from fused_attn import masks
from fused_attn.masks import mask_mod as module
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask

flex = pytest.importorskip("torch.nn.attention.flex_attention")
attend = fused_attn.scaled_dot_product_attention

B, H, LQ, LK = 2, 3, 50, 61
IDS = torch.tensor([0] * 10 + [1] * 25 + [2] * 15)
KEY_IDS = torch.cat([IDS, torch.full((11,), 2)])
LENGTHS, PREFIXES = torch.tensor([40, 61]), torch.tensor([7, 20])
TABLE = torch.rand(H, LQ, LK, generator=torch.Generator().manual_seed(0)) > 0.5

# Name -> (mask_mod, kind). The kind is that of the MaskSpec, or "keys" if bounds describe the mask.
MODS = {
    "causal": (lambda b, h, q, k: q >= k, "causal"),
    "all": (lambda b, h, q, k: q >= 0, "none"),
    "nothing": (lambda b, h, q, k: q < 0, "keys"),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 9), "structured"),
    "both sides": (lambda b, h, q, k: (q - k).abs() < 9, "structured"),
    "ahead": (lambda b, h, q, k: (k - q > 3) & (k - q < 8), "structured"),
    "bottom right": (lambda b, h, q, k: k <= q + (LK - LQ), "structured"),
    "prefix": (lambda b, h, q, k: (k <= q) | (k < PREFIXES[b]), "structured"),
    "padding": (lambda b, h, q, k: k < LENGTHS[b], "keys"),
    "left padding": (lambda b, h, q, k: k >= LK - LENGTHS[b], "keys"),
    "padded queries": (lambda b, h, q, k: (k < LENGTHS[b]) & (q < LENGTHS[b]), "structured"),
    "prefix, padded": (
        lambda b, h, q, k: ((k <= q) | (k < PREFIXES[b])) & (k < LENGTHS[b]),
        "keys",
    ),
    "documents": (lambda b, h, q, k: IDS[q] == KEY_IDS[k], "structured"),
    "causal documents": (lambda b, h, q, k: (IDS[q] == KEY_IDS[k]) & (q >= k), "structured"),
    "rows without keys": (lambda b, h, q, k: (q >= k) & (q % 5 != 0), "structured"),
    "sinks": (lambda b, h, q, k: (q >= k) & ((q - k < 9) | (k < 4)), "dense"),
    "dilated": (lambda b, h, q, k: (q >= k) & ((q - k) % 2 == 0), "dense"),
    "windows of heads": (lambda b, h, q, k: (q >= k) & (q - k < 3 + h), "structured"),
    "table": (lambda b, h, q, k: TABLE[h, q, k], "dense"),
}


def visible_by(mask, *sizes):
    """Return the kind of a mask, as in MODS, and a bool tensor of its visible positions."""
    spec = spec_of_mask(mask, *sizes, torch.device("cpu"))
    visible, _ = materialize(spec, *sizes, torch.device("cpu"), torch.float32)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if visible is None else visible
    kind = "keys" if spec.kind == "dense" and spec.dense is spec.bits is None else spec.kind
    return kind, visible.expand(sizes)


def assert_same_attention(one, other, query, key=None, value=None):
    """Assert that two masks give the same output; key defaults to query, and value to key."""
    key = query if key is None else key
    value = key if value is None else value
    torch.testing.assert_close(*(attend(query, key, value, mask) for mask in (one, other)))


@pytest.mark.parametrize("chunk", [module.CHUNK, 7 * LK])
@pytest.mark.parametrize(("mask_mod", "kind"), MODS.values(), ids=MODS)
def test_same_positions_as_in_flex_attention(mask_mod, kind, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    found, visible = visible_by(masks.from_mask_mod(mask_mod), B, H, LQ, LK)
    assert torch.equal(visible, flex.create_mask(mask_mod, B, H, LQ, LK, device="cpu"))
    assert found == kind


@pytest.mark.parametrize(("name", "heads"), [("windows of heads", H), ("table", H), ("dilated", 1)])
def test_tables(name, heads):
    """A table has several heads only if mask_mod depends on the head; on CUDA, masks are dense."""
    spec = spec_of_mask(masks.from_mask_mod(MODS[name][0]), B, H, LQ, LK, torch.device("cpu"))
    table = spec.intervals if spec.bits is None else spec.bits
    assert table.shape[:2] == (1, heads)
    shape = (1, heads, LQ, LK)
    expected = flex.create_mask(MODS[name][0], *shape, device="cpu")
    found = module.recognized(
        lambda rows: expected[:, :, rows.start : rows.stop], shape, shape, torch.device("cuda")
    )
    assert torch.equal(found.dense_masks[0], expected)


def test_random_intervals():
    """Recognizing structure does not change the visible positions of random interval masks."""
    generator = torch.Generator().manual_seed(1)

    def draw(high, *size):
        return torch.randint(high, size, generator=generator)

    for _ in range(200):
        lq, lk = draw(12, 2).add(1).tolist()
        first, length = draw(lk, B, lq), draw(4, B, lq)
        if draw(2, 1):  # the same diagonal for most rows
            first = (torch.arange(lq) - draw(4, 1)).clamp(0, lk - 1).expand(B, lq)
            length = draw(6, 1).expand(B, lq)

        def mask_mod(b, h, q, k, first=first, length=length):
            return (k >= first[b, q]) & (k < first[b, q] + length[b, q])

        _, visible = visible_by(masks.from_mask_mod(mask_mod), B, 1, lq, lk)
        assert torch.equal(visible, flex.create_mask(mask_mod, B, 1, lq, lk, device="cpu"))


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (masks.sliding_window(3), masks.sliding_window(-1, 5), "structured"),
        (masks.causal(), masks.prefix_lm([7, 20]), "structured"),
        (masks.sliding_window(3), masks.dense(TABLE), "dense"),
        (masks.padding([40, 61]), masks.padding([0, 9]), "keys"),
        (masks.causal(), masks.from_mask_mod(MODS["sinks"][0]), "causal"),
        (masks.causal(), masks.sliding_window(-1, -1), "none"),  # a window without limits
    ],
)
def test_unions(one, other, kind, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 11 * LK)
    found, visible = visible_by(one | other, B, H, LQ, LK)
    parts = [visible_by(mask, B, H, LQ, LK)[1] for mask in (one, other)]
    assert torch.equal(visible, parts[0] | parts[1])
    assert found == kind


@pytest.mark.parametrize("name", ["window", "causal documents", "windows of heads"])
def test_values_and_gradients(name):
    mask = masks.from_mask_mod(MODS[name][0]) & masks.padding([LK, 30])
    leaves = [torch.randn(B, H, length, 16, requires_grad=True) for length in (LQ, LK, LK)]
    results = []
    for same in (mask, masks.dense(visible_by(mask, B, H, LQ, LK)[1])):
        out = attend(*leaves, same)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("by_batch", [False, True])
def test_block_masks(by_batch):
    """In a BlockMask, unlisted blocks are masked, and mask_mod is not applied in full blocks."""
    length, starts = 300, torch.tensor([0, 70])

    def mask_mod(b, h, q, k):
        visible = (q >= k) & (q - k < 150)
        return visible & (k >= starts[b]) if by_batch else visible

    block_mask = flex.create_block_mask(
        mask_mod, B if by_batch else None, None, length, length, "cpu"
    )
    query, key, value = (torch.randn(B, H, length, 8) for _ in range(3))
    expected = flex.create_mask(mask_mod, B, 1, length, length, device="cpu")
    assert_same_attention(block_mask, expected, query, key, value)
    diagonal = torch.arange(3).int().view(1, 1, 3, 1).repeat(1, 1, 1, 3)
    some = flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 3).int(), diagonal, torch.tensor([[[0, 1, 1]]]).int(),
        torch.zeros(1, 1, 3, 3).int(), mask_mod=MODS["causal"][0], seq_lengths=(length, length),
    )  # fmt: skip
    row, column = torch.arange(length)[:, None] // 128, torch.arange(length) // 128
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    expected = ((row == column) & causal) | ((column == 0) & (row > 0))
    assert_same_attention(some, expected, query, key, value)
    with pytest.raises(ValueError, match="a BlockMask for lengths"):
        attend(query[:, :, :9], key, value, block_mask)


def test_packed_sequences():
    """With packed sequences, a mask function receives positions within each sequence."""
    packed, starts = torch.randn(30, H, 8), torch.tensor([0, 10, 30])
    call = functools.partial(
        fused_attn.varlen_attention, packed, packed, packed, starts, starts, 20, 20
    )
    mask = masks.from_mask_mod(MODS["window"][0])
    torch.testing.assert_close(call(mask), call(masks.sliding_window(8)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.from_mask_mod(lambda b, h, q, k: q - k <= h),
        lambda: masks.causal() | masks.sliding_window(1, 1),
        lambda: masks.causal("bottom_right"),
    ],
    ids=["function", "union", "bottom right"],
)
def test_graphs_of_dynamic_lengths(make):
    class Attend(torch.nn.Module):
        def forward(self, query, key):
            return attend(query, key, key, make())

    torch.compiler.reset()
    module, of = Attend(), {2: torch.export.Dim.DYNAMIC}
    example = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 14, 8)
    program = torch.export.export(module, example, dynamic_shapes=(of, of)).module()
    dynamic = torch.compile(module, backend="eager", dynamic=True, fullgraph=True)
    static = torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True)
    for lengths in ((9, 14), (12, 12), (12, 20)):
        tensors = [torch.randn(2, 4, length, 8) for length in lengths]
        expected = module(*tensors)
        for graph in (program, dynamic, static):
            torch.testing.assert_close(graph(*tensors), expected)


def test_each_shape_is_evaluated_once():
    calls = []

    def mask_mod(b, h, q, k):
        calls.append(1)
        return q >= k

    mask, query = masks.from_mask_mod(mask_mod), torch.randn(B, H, LQ, 8)
    attend(query, query, query, mask)
    count = len(calls)
    attend(query, query, query, mask)
    assert len(calls) == count


@pytest.mark.parametrize("hidden", [False, True])
def test_alignment_does_not_depend_on_a_mask_function(hidden):
    """Bottom-right bands align with the sequence ends, not a mask function's last visible key."""
    few = masks.from_mask_mod(lambda b, h, q, k: (k < 5) & ((q != 1) | (k != 3) | (not hidden)))
    query, key = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 8, 8)
    for other in (masks.causal("bottom_right"), masks.sliding_window(2, 0, "bottom_right")):
        visible, band = (visible_by(mask, 2, 1, 4, 8)[1] for mask in (few, other))
        assert_same_attention(other & few, band & visible, query, key)
        assert_same_attention(other | few, band | visible, query, key)


def test_unions_in_caches_and_packs_are_aligned_at_the_sequences():
    mask = masks.sliding_window(2, 0, "bottom_right")
    mask |= masks.from_mask_mod(lambda b, h, q, k: k < 2)
    lengths, key = [8, 12], torch.randn(2, 1, 16, 8)
    query = torch.randn(2, 1, 1, 8)
    out = fused_attn.decode_attention(query, key, key, cache_lengths=lengths, attn_mask=mask)
    for b, length in enumerate(lengths):
        rows = key[b : b + 1, :, [0, 1, *range(length - 3, length)]]
        torch.testing.assert_close(out[b : b + 1], attend(query[b : b + 1], rows, rows))


ENDS = torch.tensor([9, 9])


class OfEnds:
    """Mask function that is an object with a tensor as attribute."""

    def __init__(self, ends):
        self.ends = ends

    def __call__(self, b, h, q, k):
        return k < self.ends[b]

    below = staticmethod(lambda b, k: k < ENDS[b])


@functools.cache
def made_late():
    return torch.tensor([9, 9])


class Owner(SimpleNamespace):
    """Unhashable object with a mask function as method."""

    def mask_mod(self, b, h, q, k):
        return k < self.ends[b]


def of_attribute(ends):
    def mask_mod(b, h, q, k):
        return k < mask_mod.ends[b]

    mask_mod.ends = ends
    return mask_mod


OF_GLOBAL = functools.partial(lambda n, b, k: k < n[b], ENDS)
READERS = {  # name -> function of ENDS that returns a mask function
    "closure": lambda ends: lambda b, h, q, k: k < ends[b],
    "combined": lambda ends: flex.and_masks(
        lambda b, h, q, k: k < ends[b], lambda b, h, q, k: k <= q + 9
    ),
    "partial": lambda ends: functools.partial(lambda n, b, h, q, k: k < n[b], ends),
    "global": lambda _: lambda b, h, q, k: k < ENDS[b],
    "object": OfEnds,
    "default": lambda ends: lambda b, h, q, k, ends=ends: k < ends[b],
    "attribute": of_attribute,
    "nested": lambda _: lambda b, h, q, k: (lambda n: n < ENDS[b])(k),
    "generator": lambda _: lambda b, h, q, k: next(key < ENDS[b] for key in (k,)),
    "static": lambda _: lambda b, h, q, k: OfEnds.below(b, k),
    "global_partial": lambda _: lambda b, h, q, k: OF_GLOBAL(b, k),
    "owner": lambda ends: Owner(ends=ends).mask_mod,
    "lazy": lambda _: lambda b, h, q, k: k < made_late()[b],
}


@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_tensors_that_a_function_reads_may_change(make):
    mask, query = masks.from_mask_mod(make(ENDS)), torch.randn(2, 1, 9, 8)
    made_late.cache_clear()
    ENDS.fill_(9)
    assert mask.to("cpu") is mask
    attend(query, query, query, mask)
    attend(query, query, query, mask & masks.causal())
    for tensor in (ENDS, made_late()):
        tensor.fill_(3)
    short = masks.padding([3, 3])
    assert_same_attention(mask, short, query)
    assert_same_attention(mask & masks.causal(), short & masks.causal(), query)


def test_a_tensor_may_select_the_tensors_that_a_function_reads():
    flag, end = torch.tensor(True), torch.tensor(9)
    mask = masks.from_mask_mod(lambda b, h, q, k: flag if flag else k < end)
    query = torch.randn(2, 1, 9, 8)
    for tensor, value, length in ((flag, True, 9), (flag, False, 9), (end, 3, 3)):
        tensor.fill_(value)
        assert_same_attention(mask, masks.padding([length] * 2), query)
    assert len(mask.memo) == 1 and next(iter(mask.memo.values())).read


def test_functions_that_read_only_the_size_of_a_parameter_are_evaluated_once():
    model, calls = SimpleNamespace(layer=torch.nn.Linear(8, 5)), []

    def mask_mod(b, h, q, k):
        calls.append(model.layer.weight.device)
        return k < model.layer.weight.shape[0]

    query, mask = torch.randn(2, 1, 9, 8), masks.from_mask_mod(mask_mod)
    for _ in range(3):
        attend(query, query, query, mask)
    assert len(calls) == 2  # the first call determines which indices mask_mod uses


def test_functions_that_call_each_other_or_capture_an_unset_variable():
    def even(n):
        return odd(n - 1) if n else True

    def odd(n):
        return even(n - 1)

    def unset(b, h, q, k):
        return k <= q if n_heads_known else later

    query, n_heads_known = torch.randn(1, 2, 4, 8), True
    for mask_mod in (lambda b, h, q, k: (k <= q) if even(4) else (k >= q), unset):
        assert_same_attention(masks.from_mask_mod(mask_mod), masks.causal(), query)
    later = None


def test_functions_that_are_named_tuples():
    class Window(NamedTuple):
        left: int
        right: int

        def __call__(self, b, h, q, k):
            return (q - k <= self.left) & (k - q <= self.right)

    query, mask = torch.randn(1, 2, 9, 8), masks.from_mask_mod(Window(2, 1))
    assert_same_attention(mask, masks.sliding_window(2, 1), query)


def test_the_blocks_of_a_block_mask_may_change():
    query = torch.randn(1, 1, 32, 8)
    block_mask = flex.create_block_mask(
        lambda b, h, q, k: k >= 0, None, None, 32, 32, device="cpu", BLOCK_SIZE=16
    )
    attend(query, query, query, block_mask)
    block_mask.full_kv_num_blocks.fill_(1)
    first = block_mask.full_kv_indices[0, 0, :, :1].repeat_interleave(16, 0)
    assert_same_attention(block_mask, first == torch.arange(32) // 16, query)


def test_another_mask_mod_of_a_block_mask():
    query = torch.randn(1, 1, 128, 8)
    block_mask = flex.create_block_mask(MODS["causal"][0], None, None, 128, 128, "cpu")
    assert_same_attention(block_mask, masks.causal(), query)
    block_mask.mask_mod = lambda b, h, q, k: q <= k
    assert_same_attention(block_mask, masks.sliding_window(0, -1), query)


def test_block_masks_are_freed():
    query = torch.randn(1, 1, 128, 8)
    block_mask = flex.create_block_mask(MODS["causal"][0], None, None, 128, 128, "cpu")
    attend(query, query, query, block_mask)
    alive = weakref.ref(block_mask)
    del block_mask
    gc.collect()
    assert alive() is None


def test_refusals():
    query = torch.randn(1, 1, 4, 8)
    mask = masks.from_mask_mod(lambda b, h, q, k: (q + k) % 3)
    with pytest.raises(TypeError, match="mask_mod must return bool, got"):
        attend(query, query, query, mask)
    with pytest.raises(TypeError, match="mask_mod must be a function, got Tensor"):
        masks.from_mask_mod(torch.ones(3))
    with pytest.raises(ValueError, match=r"cannot be combined with \|"):
        masks.causal() | masks.bias(torch.zeros(3, 3))
    with pytest.raises(TypeError):
        masks.causal() | torch.ones(3, 3, dtype=torch.bool)
