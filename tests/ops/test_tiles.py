"""Fully masked tiles are skipped, and fully visible tiles read no mask."""

from __future__ import annotations

import pytest
import torch
from cpu_tiles import tile_kinds
from mask_cases import MASKS, PAIRS

from fused_attn import masks
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import normalize

SHAPE = (3, 2, 301, 650)  # batch, num_heads, seqlen_q, seqlen_k
# Document ranges overlap where ids are shuffled, and a summary cell may be larger than a tile.
INEXACT = {"documents_shuffled", "dense", "dense_full", "dense_transposed", "dense_per_query"}


def classify(mask, dtype):
    """Return the kernels' tile kinds, and whether no or every position of each tile is visible."""
    like = torch.empty(0, dtype=dtype)
    spec = normalize(mask, *SHAPE, like)
    kinds, (block_m, block_n) = tile_kinds(spec, *SHAPE, dtype)
    visible, bias = materialize(spec, *SHAPE, like.device, torch.float32)
    visible = torch.ones(SHAPE) if visible is None else visible.expand(SHAPE).float()
    plain = visible
    if bias is not None:
        plain = visible * (bias == 0).expand(SHAPE)
    pad = (0, -SHAPE[3] % block_n, 0, -SHAPE[2] % block_m)

    def tiles(tensor, value):
        padded = torch.nn.functional.pad(tensor, pad, value=value)
        cut = padded.unflatten(3, (-1, block_n)).unflatten(2, (-1, block_m))
        return cut.movedim(4, 3)  # (batch, heads, tiles, blocks, block_m, block_n)

    none = tiles(visible, 0.0).amax((-1, -2)) == 0
    every = tiles(plain, 1.0).amin((-1, -2)) == 1
    return kinds, none, every


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_classification_of_one_mask(name, dtype):
    kinds, none, every = classify(MASKS[name](SHAPE[0], SHAPE[1], *SHAPE[2:]), dtype)
    assert none[kinds == 0].all() and every[kinds == 2].all()
    if name not in INEXACT and not name.startswith("alibi"):
        assert torch.equal(kinds == 0, none)
        assert torch.equal(kinds == 2, every)


@pytest.mark.parametrize("pair", PAIRS)
def test_classification_of_two_masks(pair):
    """A combination of two masks skips each tile that either mask skips.

    Two biases, and bottom-right bands with lengths, are exceptions.
    """
    one, two = (MASKS[name](SHAPE[0], SHAPE[1], *SHAPE[2:]) for name in pair)
    kinds, none, every = classify(one & two, torch.float32)
    assert none[kinds == 0].all() and every[kinds == 2].all()
    if "bias" in pair[0] and "bias" in pair[1]:
        return  # they become one float mask
    bottom_right = {"causal_bottom_right", "window_right_only"}
    if bottom_right & set(pair) and any("ragged" in n or "padding" in n for n in pair):
        return  # lengths move the diagonal
    for mask in (one, two):
        assert (kinds[classify(mask, torch.float32)[0] == 0] == 0).all()


def test_work_goes_down_with_the_mask():
    """The share of tiles that are computed is close to the share of visible scores."""
    length = 4096

    def share(mask):
        spec = normalize(mask, 1, 1, length, length, torch.empty(0))
        kinds, (_, block) = tile_kinds(spec, 1, 1, length, length, torch.float32)
        return (kinds > 0).float().mean().item(), block / length

    for mask, exact in (
        (masks.causal(), 0.5),
        (masks.sliding_window(512), 512 / length),
        (masks.documents(torch.arange(length) // 512), 1 / 8),
        (masks.dense((torch.arange(length) // 512)[:, None] == torch.arange(length) // 512), 1 / 8),
        (masks.padding([length // 4]), 1 / 4),
    ):
        got, one_block = share(mask)
        assert exact <= got + 0.01 and got <= exact + 2 * one_block
