"""timm's ViT, DeiT and Swin with random weights: results equal those of torch's kernels.

`enable()` replaces the `scaled_dot_product_attention` of torch that their attention calls.
`swap_modules` replaces their norms.
"""

from __future__ import annotations

import copy

import pytest
import torch
from enable_helpers import taken_over
from nn_helpers import (
    DRAWS,
    assert_equal_in_float64,
    assert_within_contract,
    cast,
    perturb,
    pooled,
    run,
    swapped_copy,
)
from torchvision_stand_in import import_timm

import fused_attn

SMALL = {"img_size": 32, "num_classes": 7, "drop_path_rate": 0.0}
# name -> (timm's model, its options, number of attention calls, number of norms)
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 2}, 2, 5),
    "deit": ("deit_tiny_distilled_patch16_224", {"patch_size": 8, "depth": 2}, 2, 5),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
        4,
        11,
    ),
}


@pytest.fixture(scope="module")
def timm():
    module = import_timm()
    module.layers.set_fused_attn(True, experimental=True)  # for Swin
    yield module
    module.layers.set_fused_attn(True)


@pytest.fixture(params=MODELS)
def case(request, timm):
    """Return a float64 model, images, and the model's numbers of attention calls and norms."""
    name, options, calls, norms = MODELS[request.param]
    model = timm.create_model(name, **SMALL, **options).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    return perturb(model), images, calls, norms


@pytest.mark.parametrize("swap", [False, True], ids=["enable", "enable and swap"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_forward_and_backward(case, training, swap):
    model, images, calls, norms = case
    model.train(training)
    expected = run(model, (images,))
    report = fused_attn.swap_modules(model) if swap else None
    with taken_over() as computed:
        actual = run(model, (images,))
    assert len(computed) == calls
    if report is not None:
        assert len(report.swapped) == norms and not report.skipped
    assert_equal_in_float64(actual, expected)


def test_numerics(case):
    eager = case[0].float()
    truth, fused = copy.deepcopy(eager).double(), swapped_copy(eager)
    draws = [(torch.randn(2, 3, 32, 32, requires_grad=True),) for _ in range(DRAWS)]
    with fused_attn.enabled():
        actual = pooled([run(fused, images) for images in draws])
    expected = pooled([run(eager, images) for images in draws])
    exact = pooled([run(truth, cast(images, torch.float64)) for images in draws])
    assert_within_contract(actual, expected, exact)


@pytest.mark.parametrize("case", ["swin"], indirect=True)
def test_relative_position_bias_is_learned(case):
    """Swin's position bias is a learned float mask, which includes the mask of shifted windows."""
    model, images, calls, _ = case
    with taken_over() as computed:
        results = run(model, (images,))
    masks = [mask for _, mask in computed]
    assert len(masks) == calls and all(mask.requires_grad for mask in masks)
    # (batch, heads); the batch is the number of windows if windows are shifted, otherwise 1.
    assert [tuple(mask.shape[:2]) for mask in masks] == [(1, 2), (8, 2), (1, 4), (1, 4)]
    tables = [name for name in results if name.endswith("relative_position_bias_table")]
    assert len(tables) == calls
    assert all(results[name].abs().max() > 0.0 for name in tables)


def test_other_layer_norms_are_skipped(timm):
    model = torch.nn.Sequential(timm.layers.LayerNorm2d(4), timm.layers.LayerNorm(4))
    report = fused_attn.swap_modules(model)
    assert [entry.name for entry in report.swapped] == ["1"]
    assert [entry.name for entry in report.skipped] == ["0"]
