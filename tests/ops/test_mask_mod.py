"""Masks from functions of positions, BlockMasks and unions, and which structure is recognized."""

from __future__ import annotations

import pytest
import torch

import fused_attn
from fused_attn import masks
from fused_attn.masks import mask_mod as module
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import normalize

flex = pytest.importorskip("torch.nn.attention.flex_attention")

B, H, LQ, LK = 2, 3, 50, 61
IDS = torch.tensor([0] * 10 + [1] * 25 + [2] * 15)
KEY_IDS = torch.cat([IDS, torch.full((11,), 2)])
LENGTHS, PREFIXES = torch.tensor([40, 61]), torch.tensor([7, 20])
TABLE = torch.rand(H, LQ, LK, generator=torch.Generator().manual_seed(0)) > 0.5

# Function, and the kind of MaskSpec: "dense" needs a tensor of queries x keys.
MODS = {
    "causal": (lambda b, h, q, k: q >= k, "causal"),
    "all": (lambda b, h, q, k: q >= 0, "none"),
    "nothing": (lambda b, h, q, k: q < 0, "structured"),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 9), "structured"),
    "both sides": (lambda b, h, q, k: (q - k).abs() < 9, "structured"),
    "ahead": (lambda b, h, q, k: (k - q > 3) & (k - q < 8), "structured"),
    "bottom right": (lambda b, h, q, k: k <= q + (LK - LQ), "structured"),
    "prefix": (lambda b, h, q, k: (k <= q) | (k < PREFIXES[b]), "structured"),
    "padding": (lambda b, h, q, k: k < LENGTHS[b], "structured"),
    "left padding": (lambda b, h, q, k: k >= LK - LENGTHS[b], "structured"),
    "padded queries": (lambda b, h, q, k: (k < LENGTHS[b]) & (q < LENGTHS[b]), "structured"),
    "prefix, padded": (
        lambda b, h, q, k: ((k <= q) | (k < PREFIXES[b])) & (k < LENGTHS[b]),
        "structured",
    ),
    "documents": (lambda b, h, q, k: IDS[q] == KEY_IDS[k], "structured"),
    "causal documents": (lambda b, h, q, k: (IDS[q] == KEY_IDS[k]) & (q >= k), "structured"),
    "rows without keys": (lambda b, h, q, k: (q >= k) & (q % 5 != 0), "structured"),
    "sinks": (lambda b, h, q, k: (q >= k) & ((q - k < 9) | (k < 4)), "dense"),
    "dilated": (lambda b, h, q, k: (q >= k) & ((q - k) % 2 == 0), "dense"),
    "windows of heads": (lambda b, h, q, k: (q >= k) & (q - k < 3 + h), "dense"),
    "table": (lambda b, h, q, k: TABLE[h, q, k], "dense"),
}


def visible_by(mask, *sizes):
    """Return the kind of a mask, and its visible positions."""
    spec = normalize(mask, *sizes, torch.empty(0))
    visible, _ = materialize(spec, *sizes, torch.device("cpu"), torch.float32)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if visible is None else visible
    return spec.kind, visible.expand(sizes)


@pytest.mark.parametrize("chunk", [module.CHUNK, 7 * LK])
@pytest.mark.parametrize(("mask_mod", "kind"), MODS.values(), ids=MODS)
def test_same_positions_as_in_flex_attention(mask_mod, kind, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    found, visible = visible_by(masks.from_mask_mod(mask_mod), B, H, LQ, LK)
    assert torch.equal(visible, flex.create_mask(mask_mod, B, H, LQ, LK, device="cpu"))
    assert found == kind


def test_random_intervals():
    """Functions whose rows are intervals have the same positions, whatever is recognized."""
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
        (masks.padding([40, 61]), masks.padding([0, 9]), "structured"),
        (masks.causal(), masks.from_mask_mod(MODS["sinks"][0]), "causal"),
    ],
)
def test_unions(one, other, kind, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 11 * LK)
    found, visible = visible_by(one | other, B, H, LQ, LK)
    parts = [visible_by(mask, B, H, LQ, LK)[1] for mask in (one, other)]
    assert torch.equal(visible, parts[0] | parts[1])
    assert found == kind or (kind == "causal" and found == "structured")


@pytest.mark.parametrize("name", ["window", "causal documents", "windows of heads"])
def test_values_and_gradients(name):
    mask = masks.from_mask_mod(MODS[name][0]) & masks.padding([LK, 30])
    dense = masks.dense(visible_by(mask, B, H, LQ, LK)[1])
    results = []
    for own in (mask, dense):
        generator = torch.Generator().manual_seed(2)
        shapes = (B, H, LQ, 16), (B, H, LK, 16), (B, H, LK, 16)
        leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
        out = fused_attn.scaled_dot_product_attention(*leaves, own)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("by_batch", [False, True])
def test_block_masks(by_batch):
    """Blocks that are not listed are masked, and full blocks do not apply the function."""
    length = 300
    starts = torch.tensor([0, 70])

    def mask_mod(b, h, q, k):
        seen = (q >= k) & (q - k < 150)
        return seen & (k >= starts[b]) if by_batch else seen

    block_mask = flex.create_block_mask(
        mask_mod, B if by_batch else None, None, length, length, "cpu"
    )
    query, key, value = (torch.randn(B, H, length, 8) for _ in range(3))
    expected = flex.create_mask(mask_mod, B, 1, length, length, device="cpu")
    out = fused_attn.scaled_dot_product_attention(query, key, value, block_mask)
    torch.testing.assert_close(
        out, fused_attn.scaled_dot_product_attention(query, key, value, expected)
    )
    diagonal = torch.arange(3, dtype=torch.int32).view(1, 1, 3, 1).repeat(1, 1, 1, 3)
    some = flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 3, dtype=torch.int32), diagonal,
        full_kv_num_blocks=torch.tensor([[[0, 1, 1]]], dtype=torch.int32),
        full_kv_indices=torch.zeros(1, 1, 3, 3, dtype=torch.int32),
        mask_mod=lambda b, h, q, k: q >= k, seq_lengths=(length, length),
    )  # fmt: skip
    row, column = torch.arange(length)[:, None] // 128, torch.arange(length) // 128
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    expected = ((row == column) & causal) | ((column == 0) & (row > 0))
    out = fused_attn.scaled_dot_product_attention(query, key, value, some)
    torch.testing.assert_close(
        out, fused_attn.scaled_dot_product_attention(query, key, value, expected)
    )
    with pytest.raises(ValueError, match="a BlockMask for lengths"):
        fused_attn.scaled_dot_product_attention(query[:, :, :9], key, value, block_mask)


def test_packed_sequences_and_graphs():
    """Positions are those within a sequence; in a graph, the mask is dense."""
    mask = masks.from_mask_mod(MODS["window"][0])
    packed, starts = torch.randn(30, H, 8), torch.tensor([0, 10, 30])
    torch.testing.assert_close(
        fused_attn.varlen_attention(packed, packed, packed, starts, starts, 20, 20, mask),
        fused_attn.varlen_attention(
            packed, packed, packed, starts, starts, 20, 20, masks.sliding_window(8)
        ),
    )
    query = torch.randn(B, H, LQ, 8)

    def attend(query):
        sliding = masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 9))
        return fused_attn.scaled_dot_product_attention(query, query, query, sliding)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), attend(query))


def test_each_shape_is_evaluated_once():
    calls = []

    def mask_mod(b, h, q, k):
        calls.append(1)
        return q >= k

    mask, query = masks.from_mask_mod(mask_mod), torch.randn(B, H, LQ, 8)
    fused_attn.scaled_dot_product_attention(query, query, query, mask)
    count = len(calls)
    fused_attn.scaled_dot_product_attention(query, query, query, mask)
    assert len(calls) == count


def test_refusals():
    with pytest.raises(TypeError, match="mask_mod must be a function, got Tensor"):
        masks.from_mask_mod(torch.ones(3))
    with pytest.raises(ValueError, match="cannot be united"):
        masks.causal() | masks.bias(torch.zeros(3, 3))
    with pytest.raises(TypeError):
        masks.causal() | torch.ones(3, 3, dtype=torch.bool)
