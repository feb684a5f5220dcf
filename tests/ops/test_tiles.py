"""Fully masked tiles are skipped, and no mask is read for fully visible tiles."""

import itertools

import pytest
import torch
from cpu_tiles import tile_kinds
from helpers import BACKENDS, device_of
from mask_cases import MASKS, PAIRS

from fused_attn import masks
from fused_attn.backends import get_backend
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask

CPU = torch.device("cpu")
SHAPE = (3, 2, 301, 650)  # batch, num_heads, seqlen_q, seqlen_k
# For these masks, some masked or full tiles are classified as partial: ranges of shuffled document
# ids overlap, and a cell of the summary may be larger than a tile.
INEXACT = {"documents_shuffled", "dense", "dense_full", "dense_transposed", "dense_per_query"}


def classify(mask, dtype):
    """Return the kernels' tile kinds, and which tiles are fully masked or fully visible."""
    spec = spec_of_mask(mask, *SHAPE, CPU)
    kinds, (block_m, block_n) = tile_kinds(spec, *SHAPE, dtype)
    visible, bias = materialize(spec, *SHAPE, CPU, torch.float32)
    visible = torch.ones(SHAPE) if visible is None else visible.expand(SHAPE).float()
    plain = visible if bias is None else visible * (bias == 0).expand(SHAPE)
    pad = (0, -SHAPE[3] % block_n, 0, -SHAPE[2] % block_m)

    def tiles(tensor, value):
        padded = torch.nn.functional.pad(tensor, pad, value=value)
        split = padded.unflatten(3, (-1, block_n)).unflatten(2, (-1, block_m))
        return split.movedim(4, 3)  # (batch, heads, tiles, blocks, block_m, block_n)

    none = tiles(visible, 0.0).amax((-1, -2)) == 0
    every = tiles(plain, 1.0).amin((-1, -2)) == 1
    return kinds, none, every


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_classification_of_one_mask(name, dtype):
    kinds, none, every = classify(MASKS[name](*SHAPE), dtype)
    assert none[kinds == 0].all() and every[kinds == 2].all()
    if name not in INEXACT and not name.startswith("alibi"):
        assert torch.equal(kinds == 0, none)
        assert torch.equal(kinds == 2, every)


@pytest.mark.parametrize("pair", PAIRS)
def test_classification_of_two_masks(pair):
    """A combination of two masks skips each tile that either mask skips.

    Exceptions are combinations of two biases, and of a bottom-right band with lengths.
    """
    one, two = (MASKS[name](*SHAPE) for name in pair)
    kinds, none, every = classify(one & two, torch.float32)
    assert none[kinds == 0].all() and every[kinds == 2].all()
    if "bias" in pair[0] and "bias" in pair[1]:
        return  # two biases become one float mask
    bottom_right = {"causal_bottom_right", "window_right_only"}
    if bottom_right & set(pair) and any("ragged" in n or "padding" in n for n in pair):
        return  # lengths move the diagonal
    for mask in (one, two):
        assert (kinds[classify(mask, torch.float32)[0] == 0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_summary_of_a_dense_tensor(kind, backend):
    """The summary is 0 for a fully masked tile, 2 for a fully visible one with bias 0, else 1."""
    visible = torch.ones(2, 1, 70, 150, dtype=torch.bool)
    visible[0, :, :32, :64] = False
    visible[0, :, 33, 70] = False
    visible[1, :, 64:, 128:] = False  # the last tile, which is smaller
    tensor = plain = visible
    if kind == "bias":
        tensor = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        tensor[1, :, 0, 0] = 0.5  # a nonzero bias, which the kernel must read
        plain = tensor == 0
    expected = torch.ones(2, 1, 3, 3, dtype=torch.uint8)
    for b, i, j in itertools.product(range(2), range(3), range(3)):
        tile = b, 0, slice(32 * i, 32 * i + 32), slice(64 * j, 64 * j + 64)
        expected[b, 0, i, j] = 0 if not visible[tile].any() else 2 if plain[tile].all() else 1
    summary = get_backend(backend).tile_summary(tensor.to(device_of(backend)))
    assert torch.equal(summary.cpu(), expected)


def test_work_decreases_with_the_mask():
    """The share of tiles that are computed is close to the share of visible scores."""
    length = 4096

    def share(mask):
        spec = spec_of_mask(mask, 1, 1, length, length, CPU)
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
