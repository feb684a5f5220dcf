"""Masks and kernels agree with a plain Python definition of each mask at every position."""

from __future__ import annotations

import copy
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

BATCH, HEADS, LEN_Q, LEN_K = 2, 2, 6, 9


def real(length, seqlen, side, position):
    """Return True if a position of a padded sequence is a real token."""
    return position < length if side == "right" else position >= seqlen - length


def offset(align, b, key_lengths=None, query_lengths=None, side="right"):
    """Return the diagonal's offset; with bottom_right, the last real query and key are on it."""
    if align == "top_left":
        return 0
    last_key, last_query = LEN_K - 1, LEN_Q - 1
    if side == "right":
        last_key = LEN_K - 1 if key_lengths is None else key_lengths[b] - 1
        last_query = LEN_Q - 1 if query_lengths is None else query_lengths[b] - 1
    return last_key - last_query


IDS_Q, IDS_K = [[0, 0, 5, 5, -7, 2**40]] * BATCH, [[0, 5, 5, 5, -7, -7, 2**40, 2**40, 1]] * BATCH
KEYS, QUERIES = [9, 4], [3, 6]
SLOPES = torch.tensor([[0.5, 0.25], [1.0, 2.0]])

# name -> (mask, visible(b, h, i, j))
CASES = {
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "causal_bottom_right": (
        masks.causal("bottom_right"),
        lambda b, h, i, j: j <= i + offset("bottom_right", b),
    ),
    "window": (masks.sliding_window(2, 1), lambda b, h, i, j: i - 2 <= j <= i + 1),
    "window_of_itself": (masks.sliding_window(0, 0), lambda b, h, i, j: i == j),
    "window_left_unlimited": (masks.sliding_window(-1, 2), lambda b, h, i, j: j <= i + 2),
    "window_right_unlimited": (masks.sliding_window(1, -1), lambda b, h, i, j: j >= i - 1),
    "window_bottom_right": (
        masks.sliding_window(1, 1, align="bottom_right"),
        lambda b, h, i, j: abs(j - i - offset("bottom_right", b)) <= 1,
    ),
    "padding": (
        masks.padding(KEYS, QUERIES),
        lambda b, h, i, j: (
            real(KEYS[b], LEN_K, "right", j) and real(QUERIES[b], LEN_Q, "right", i)
        ),
    ),
    "padding_left": (
        masks.padding(KEYS, QUERIES, side="left"),
        lambda b, h, i, j: real(KEYS[b], LEN_K, "left", j) and real(QUERIES[b], LEN_Q, "left", i),
    ),
    "ragged_bottom_right": (
        masks.padding(KEYS, QUERIES) & masks.causal("bottom_right"),
        lambda b, h, i, j: (
            j < KEYS[b] and i < QUERIES[b] and j <= i + offset("bottom_right", b, KEYS, QUERIES)
        ),
    ),
    "ragged_left_bottom_right": (
        masks.causal("bottom_right") & masks.padding(KEYS, QUERIES, side="left"),
        lambda b, h, i, j: (
            real(KEYS[b], LEN_K, "left", j)
            and real(QUERIES[b], LEN_Q, "left", i)
            and j <= i + offset("bottom_right", b, KEYS, QUERIES, "left")
        ),
    ),
    "two_paddings_bottom_right": (
        masks.padding([9, 9]) & masks.padding(KEYS) & masks.padding([9, 8])
        & masks.causal("bottom_right"),
        lambda b, h, i, j: j < KEYS[b] and j <= i + offset("bottom_right", b, KEYS),
    ),
    "prefix": (masks.prefix_lm([0, 4]), lambda b, h, i, j: j <= i or j < [0, 4][b]),
    "prefix_and_window": (
        masks.prefix_lm([0, 4]) & masks.sliding_window(2, -1) & masks.prefix_lm([8, 5]),
        lambda b, h, i, j: (j <= i or j < [0, 4][b]) and j >= i - 2,
    ),
    "documents": (
        masks.documents(IDS_Q, IDS_K),
        lambda b, h, i, j: IDS_Q[b][i] == IDS_K[b][j],
    ),
    "two_documents": (
        masks.documents(torch.tensor(IDS_Q), torch.tensor(IDS_K))
        & masks.documents(torch.arange(LEN_Q) % 2, torch.arange(LEN_K) % 2),
        lambda b, h, i, j: IDS_Q[b][i] == IDS_K[b][j] and i % 2 == j % 2,
    ),
}  # fmt: skip


def expected_of(visible):
    return torch.tensor(
        [
            [[[visible(b, h, i, j) for j in range(LEN_K)] for i in range(LEN_Q)]
             for h in range(HEADS)]
            for b in range(BATCH)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_visible_as_documented(name):
    mask, visible = CASES[name]
    shape = (BATCH, HEADS, LEN_Q, LEN_K)
    spec = spec_of_mask(mask, *shape, torch.device("cpu"))
    got, bias = materialize(spec, *shape, torch.device("cpu"), torch.float32)
    assert bias is None
    assert torch.equal(got.expand(shape), expected_of(visible))
    if spec.query_documents is not None:  # kernels may read them as int32
        assert torch.cat([spec.query_documents, spec.key_documents], 1).abs().max() < 1 << 31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_not_copied(dtype):
    bias = torch.zeros(LEN_Q, LEN_K, dtype=dtype)
    spec = spec_of_mask(masks.bias(bias), BATCH, HEADS, LEN_Q, LEN_K, torch.device("cpu"))
    assert spec.bias.data_ptr() == bias.data_ptr()


def test_checksums():
    """Checksums depend on conditions, tensors, functions and values captured by functions."""

    def above(n):
        return lambda b, h, q, k: q > k + n

    functions = [lambda b, h, q, k: q > k, lambda b, h, q, k: k > q, above(1), above(2)]
    functions += [lambda b, h, q, k, n=n: q > k + n for n in (1, 2)]
    functions += [lambda b, h, q, k, *, n=n: q > k + n for n in torch.tensor([1, 2])]

    functions += [lambda b, h, q, k: (lambda z: z + 1)(q) >= k]
    functions += [lambda b, h, q, k: (lambda z: z + 2)(q) >= k]

    def recursive(b, h, q, k, depth=1):
        return recursive(b, h, q, k, 0) if depth else later(q, k)

    functions.append(recursive)
    given = [None, masks.causal(), masks.padding([3, 5]), masks.padding([5, 3])]
    given += [masks.from_mask_mod(function) for function in functions]
    found = [checksum(mask) for mask in given]
    assert len(set(found)) == len(given)
    assert found == [checksum(mask) for mask in given]
    later = torch.ge  # captured above, without a value until here
    assert checksum(given[-1]) != found[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_see_what_is_documented(name, backend):
    """Kernels give nonzero weights to exactly the keys that are documented as visible."""
    mask, visible = CASES[name]
    there = device_of(backend)
    x = torch.zeros(BATCH, HEADS, LEN_Q, 4, device=there)
    value = torch.eye(LEN_K, device=there).expand(BATCH, HEADS, -1, -1)
    keys = torch.zeros(BATCH, HEADS, LEN_K, 4, device=there)
    out = F.scaled_dot_product_attention(x, keys, value, mask.to(there), backend=backend)
    assert torch.equal(out.cpu() != 0, expected_of(visible))


@pytest.mark.parametrize("align", masks.ALIGNMENTS)
def test_alibi_as_documented(align):
    mask = masks.alibi(SLOPES.tolist(), align)
    shape = (BATCH, HEADS, LEN_Q, LEN_K)
    spec = spec_of_mask(mask, *shape, torch.device("cpu"))
    _, bias = materialize(spec, *shape, torch.device("cpu"), torch.float32)
    for b in range(BATCH):
        for h in range(HEADS):
            for i in range(LEN_Q):
                for j in range(LEN_K):
                    want = -SLOPES[b, h].item() * abs(i + offset(align, b) - j)
                    assert bias[b, h, i, j].item() == want


def test_combination_commutes():
    one, two = masks.padding([5, 9]), masks.padding([8, 3]) & masks.causal("bottom_right")
    x, y = torch.randn(BATCH, HEADS, LEN_Q, 4), torch.randn(BATCH, HEADS, LEN_K, 4)
    results = [F.scaled_dot_product_attention(x, y, y, m) for m in (one & two, two & one)]
    assert torch.equal(*results)


def test_copies_do_not_share_cached_values():
    visible = torch.ones(LEN_Q, LEN_K, dtype=torch.bool)
    visible.fill_(True)
    mask = masks.dense(visible)
    x, y = torch.randn(BATCH, HEADS, LEN_Q, 4), torch.randn(BATCH, HEADS, LEN_K, 4)
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
    x, y = torch.randn(BATCH, HEADS, LEN_Q, 4), torch.randn(BATCH, HEADS, LEN_K, 4)
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
    """Lengths, ids and slopes, also those given as lists, are moved to the device of query."""
    mask = masks.padding(KEYS, QUERIES) & masks.prefix_lm([0, 4]) & masks.alibi(SLOPES)
    query = torch.empty(BATCH, HEADS, LEN_Q, 4, device="meta")
    mask &= masks.documents(IDS_Q, IDS_K)
    mixed = masks.documents(IDS_Q, torch.zeros(BATCH, LEN_K, dtype=torch.int64, device="meta"))
    for given in (mask, mixed):
        spec = spec_of_mask(given, BATCH, HEADS, LEN_Q, LEN_K, query.device)
        found = [getattr(spec, field.name) for field in fields(spec)]
        assert {t.device.type for t in found if isinstance(t, torch.Tensor)} == {"meta"}


def test_a_new_condition_is_a_class_and_a_field(monkeypatch):
    """A new condition needs only a class and a field: mask methods find and map its tensors."""

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
    padding = masks.padding(lengths).paddings
    mask = Wider(paddings=padding, blocks=(Blocks(sizes, "of two"),))
    assert [t is own for t, own in zip(mask.tensors(), (lengths, sizes), strict=True)] == [True] * 2
    doubled = _mapped(mask.conditions(), lambda t: 2 * t)
    assert doubled[-1][0].name == "of two"
    assert torch.equal(doubled[-1][0].sizes, 2 * sizes)
