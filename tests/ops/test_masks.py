"""Masks and kernels agree with a plain Python definition of each mask at every position."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import dataclass, fields

import pytest
import torch
from helpers import BACKENDS, device_of

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.distributed.checksum import checksum
from fused_attn.masks.mask import _mapped
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask

SHAPE = BATCH, HEADS, LEN_Q, LEN_K = 2, 2, 6, 9


OFFSET = LEN_K - LEN_Q  # of the bottom-right diagonal
IDS_Q, IDS_K = [[0, 0, 5, 5, -7, 2**40]] * BATCH, [[0, 5, 5, 5, -7, -7, 2**40, 2**40, 1]] * BATCH
KEYS, QUERIES = [9, 4], [3, 6]
SLOPES = torch.tensor([[0.5, 0.25], [1.0, 2.0]])

# name -> (mask, visible(b, h, i, j))
CASES = {
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "causal_bottom_right": (masks.causal("bottom_right"), lambda b, h, i, j: j <= i + OFFSET),
    "window": (masks.sliding_window(2, 1), lambda b, h, i, j: i - 2 <= j <= i + 1),
    "window_of_itself": (masks.sliding_window(0, 0), lambda b, h, i, j: i == j),
    "window_left_unlimited": (masks.sliding_window(-1, 2), lambda b, h, i, j: j <= i + 2),
    "window_right_unlimited": (masks.sliding_window(1, -1), lambda b, h, i, j: j >= i - 1),
    "window_bottom_right": (
        masks.sliding_window(1, 1, align="bottom_right"),
        lambda b, h, i, j: abs(j - i - OFFSET) <= 1,
    ),
    "padding": (
        masks.padding(KEYS, QUERIES),
        lambda b, h, i, j: j < KEYS[b] and i < QUERIES[b],
    ),
    "padding_left": (
        masks.padding(KEYS, QUERIES, side="left"),
        lambda b, h, i, j: j >= LEN_K - KEYS[b] and i >= LEN_Q - QUERIES[b],
    ),
    "ragged_bottom_right": (  # the last real query and the last real key are on the diagonal
        masks.padding(KEYS, QUERIES) & masks.causal("bottom_right"),
        lambda b, h, i, j: j < KEYS[b] and i < QUERIES[b] and j <= i + KEYS[b] - QUERIES[b],
    ),
    "ragged_left_bottom_right": (
        masks.causal("bottom_right") & masks.padding(KEYS, QUERIES, side="left"),
        lambda b, h, i, j: (
            j >= LEN_K - KEYS[b] and i >= LEN_Q - QUERIES[b] and j <= i + OFFSET
        ),
    ),
    "two_paddings_bottom_right": (
        masks.padding([9, 9]) & masks.padding(KEYS) & masks.padding([9, 8])
        & masks.causal("bottom_right"),
        lambda b, h, i, j: j < KEYS[b] and j <= i + KEYS[b] - LEN_Q,
    ),
    "prefix": (masks.prefix_lm([0, 4]), lambda b, h, i, j: j <= i or j < [0, 4][b]),
    "prefix_and_window": (
        masks.prefix_lm([0, 4]) & masks.sliding_window(2, -1) & masks.prefix_lm([8, 5]),
        lambda b, h, i, j: (j <= i or j < [0, 4][b]) and j >= i - 2,
    ),
    "documents": (masks.documents(IDS_Q, IDS_K), lambda b, h, i, j: IDS_Q[b][i] == IDS_K[b][j]),
    "two_documents": (
        masks.documents(torch.tensor(IDS_Q), torch.tensor(IDS_K))
        & masks.documents(torch.arange(LEN_Q) % 2, torch.arange(LEN_K) % 2),
        lambda b, h, i, j: IDS_Q[b][i] == IDS_K[b][j] and i % 2 == j % 2,
    ),
}  # fmt: skip


def at_every_position(function):
    """Return a (BATCH, HEADS, LEN_Q, LEN_K) tensor of function(b, h, i, j)."""
    positions = itertools.product(*map(range, SHAPE))
    return torch.tensor([function(*position) for position in positions]).view(SHAPE)


@pytest.mark.parametrize("name", CASES)
def test_visible_as_documented(name):
    mask, visible = CASES[name]
    spec = spec_of_mask(mask, *SHAPE, torch.device("cpu"))
    got, bias = materialize(spec, *SHAPE, torch.device("cpu"), torch.float32)
    assert bias is None
    assert torch.equal(got.expand(SHAPE), at_every_position(visible))
    if spec.query_documents is not None:  # kernels may read them as int32
        assert torch.cat([spec.query_documents, spec.key_documents], 1).abs().max() < 1 << 31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_not_copied(dtype):
    bias = torch.zeros(LEN_Q, LEN_K, dtype=dtype)
    spec = spec_of_mask(masks.bias(bias), *SHAPE, torch.device("cpu"))
    assert spec.bias.data_ptr() == bias.data_ptr()


def test_checksums():
    """Checksums depend on conditions, tensors, functions and values captured by functions."""

    def above(n):
        return lambda b, h, q, k: q > k + n

    functions = [lambda b, h, q, k: q > k, lambda b, h, q, k: k > q, above(1), above(2)]
    functions += [lambda b, h, q, k, n=n: q > k + n for n in (1, 2)]
    functions += [lambda b, h, q, k, *, n=n: q > k + n for n in torch.tensor([1, 2])]
    functions += [
        lambda b, h, q, k: (lambda z: z + 1)(q) >= k, lambda b, h, q, k: (lambda z: z + 2)(q) >= k,
    ]  # fmt: skip

    def recursive(b, h, q, k, depth=1):
        return recursive(b, h, q, k, 0) if depth else later(q, k)

    functions.append(recursive)
    every = [None, masks.causal(), masks.padding([3, 5]), masks.padding([5, 3])]
    every += [masks.from_mask_mod(function) for function in functions]
    sums = [checksum(mask) for mask in every]
    assert len(set(sums)) == len(every)
    assert sums == [checksum(mask) for mask in every]
    later = torch.ge  # `recursive` captures this variable, which was not set until here
    assert checksum(every[-1]) != sums[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_see_what_is_documented(name, backend):
    """Exactly the keys that are documented as visible have nonzero weights."""
    mask, visible = CASES[name]
    device = device_of(backend)
    query, key = (torch.zeros(BATCH, HEADS, n, 4, device=device) for n in (LEN_Q, LEN_K))
    value = torch.eye(LEN_K, device=device).expand(BATCH, HEADS, -1, -1)
    out = F.scaled_dot_product_attention(query, key, value, mask.to(device), backend=backend)
    assert torch.equal(out.cpu() != 0, at_every_position(visible))


@pytest.mark.parametrize(("align", "offset"), [("top_left", 0), ("bottom_right", OFFSET)])
def test_alibi_as_documented(align, offset):
    spec = spec_of_mask(masks.alibi(SLOPES.tolist(), align), *SHAPE, torch.device("cpu"))
    _, bias = materialize(spec, *SHAPE, torch.device("cpu"), torch.float32)
    want = at_every_position(lambda b, h, i, j: -SLOPES[b, h].item() * abs(i + offset - j))
    assert torch.equal(bias, want)


def draw_qk():
    return (torch.randn(BATCH, HEADS, length, 4) for length in (LEN_Q, LEN_K))


def test_copies_do_not_share_cached_values():
    visible = torch.ones(LEN_Q, LEN_K, dtype=torch.bool)
    visible.fill_(True)  # its version counter is 1, as in the changed copies below
    mask = masks.dense(visible)
    x, y = draw_qk()
    F.scaled_dot_product_attention(x, y, y, mask)
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert not twin.memo
        twin.dense_masks[0][:, 4:] = False
        want = F.scaled_dot_product_attention(x, y[:, :, :4], y[:, :, :4])
        torch.testing.assert_close(F.scaled_dot_product_attention(x, y, y, twin), want)


EVERY_CONDITION = (
    masks.causal() & masks.padding(KEYS, QUERIES) & masks.prefix_lm([0, 4])
    & masks.documents(torch.tensor(IDS_Q), torch.tensor(IDS_K)) & masks.alibi(SLOPES)
    & masks.dense(torch.ones(LEN_Q, LEN_K, dtype=torch.bool)) & masks.bias(torch.rand(LEN_Q, LEN_K))
)  # fmt: skip


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_to_moves_every_tensor_and_nothing_else(device):
    x, y = draw_qk()
    F.scaled_dot_product_attention(x, y, y, EVERY_CONDITION)
    assert EVERY_CONDITION.memo
    moved = EVERY_CONDITION.to(device)
    assert not moved.memo and moved.to(device) is moved
    assert EVERY_CONDITION.to("cpu") is EVERY_CONDITION
    assert {t.device.type for t in moved.tensors()} == {device}
    assert [t.shape for t in moved.tensors()] == [t.shape for t in EVERY_CONDITION.tensors()]
    assert moved.bands == EVERY_CONDITION.bands
    assert [p.side for p in moved.paddings] == [p.side for p in EVERY_CONDITION.paddings]
    if device != "meta":  # meta tensors have no values
        back = moved.to("cpu").tensors()
        assert all(map(torch.equal, back, EVERY_CONDITION.tensors()))


def test_lengths_and_ids_may_be_on_the_cpu():
    """Lengths, ids and slopes, as tensors or lists, are moved to the device of query."""
    mask = masks.padding(KEYS, QUERIES) & masks.prefix_lm([0, 4]) & masks.alibi(SLOPES)
    mask &= masks.documents(IDS_Q, IDS_K)
    mixed = masks.documents(IDS_Q, torch.zeros(BATCH, LEN_K, dtype=torch.int64, device="meta"))
    for each in (mask, mixed):
        spec = spec_of_mask(each, *SHAPE, torch.device("meta"))
        found = [getattr(spec, field.name) for field in fields(spec)]
        assert {t.device.type for t in found if isinstance(t, torch.Tensor)} == {"meta"}


def test_a_new_condition_is_a_class_and_a_field(monkeypatch):
    """The methods of Mask find and map the tensors of a new class in a new field."""

    @dataclass(frozen=True)
    class Blocks:
        sizes: torch.Tensor
        name: str

    @dataclass(frozen=True, eq=False)
    class Wider(masks.Mask):
        blocks: tuple[Blocks, ...] = ()

    names = [f.name for f in fields(Wider) if f.name != "memo"]
    monkeypatch.setattr("fused_attn.masks.mask._CONDITIONS", tuple(names))
    sizes, lengths = torch.tensor([2, 3]), torch.tensor([4, 5])
    mask = Wider(paddings=masks.padding(lengths).paddings, blocks=(Blocks(sizes, "of two"),))
    assert list(map(id, mask.tensors())) == [id(lengths), id(sizes)]
    (doubled,) = _mapped(mask.conditions(), lambda t: 2 * t)[-1]
    assert doubled.name == "of two"
    assert torch.equal(doubled.sizes, 2 * sizes)
