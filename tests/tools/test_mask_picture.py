"""Pictures of masks show visible positions and skipped tiles."""

import pytest
import torch
from cpu_tiles import tile_kinds

from fused_attn import masks
from fused_attn.masks.picture import dense_head_mask
from fused_attn.masks.spec import spec_of_mask

LENGTHS = torch.tensor([200, 70])
MASKS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(70, 10),
    "padding": masks.padding(LENGTHS),
    "prefix": masks.prefix_lm(torch.tensor([90, 20])),
    "documents": masks.documents(torch.arange(200) // 77),
    "dense": masks.dense(torch.arange(200)[:, None] % 128 < torch.arange(200) % 90),
    "union": masks.padding(LENGTHS) | masks.sliding_window(20, 5),
    "nothing": masks.documents(torch.zeros(200).long(), torch.ones(200).long()),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_tiles_are_those_of_the_kernels(mask):
    spec = spec_of_mask(mask, 2, 1, 200, 200, torch.device("cpu"))
    kinds, tile = tile_kinds(spec, 2, 1, 200, 200, torch.float32)
    for sequence in range(2):
        shown, used = dense_head_mask(mask, 200, 200, sequence, 0, tile).kinds, kinds[sequence, 0]
        # Kernels may classify skipped and full tiles as partial, but not the reverse.
        assert not (used == 0)[shown > 0].any()
        assert not (used == 2)[shown < 2].any()
        assert (used == shown).float().mean() > 0.6


def test_what_is_visible_and_added():
    slopes = torch.tensor([0.0, 0.5])
    mask = masks.causal() & masks.alibi(slopes) & masks.padding(torch.tensor([3, 5]))
    of_head = dense_head_mask(mask, 4, 6, 1, 1, (2, 2))
    assert torch.equal(of_head.visible, torch.ones(4, 6).tril().bool())
    assert of_head.added is not None and of_head.added[3, 1] == -1.0
    assert of_head.kinds.tolist() == [[1, 0, 0], [2, 1, 0]]
    assert dense_head_mask(masks.Mask(), 3, 5, 0, 0, (2, 2)).kinds.tolist() == [[2] * 3] * 2


def test_picture(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="reason: needs matplotlib")
    axes = (masks.causal() & masks.bias(torch.randn(96, 96))).plot(96, tile=(32, 32))
    assert axes.get_title() == "51% of the scores are visible"
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["skipped tiles: 3", "partial: 3", "full: 3"]
    (image,) = axes.images
    assert image.get_array().shape == (96, 96, 3)
    axes.figure.savefig(tmp_path / "mask.png")
    given = pyplot.subplots()[1]
    assert masks.causal().plot(8, 12, axes=given) is given
    with pytest.raises(ValueError, match="must"):
        masks.documents(torch.arange(7)).plot(8)
    pyplot.close("all")
