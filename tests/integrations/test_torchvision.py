"""torchvision's ViT and Swin with random weights, swapped.

Swin has hand-written attention, so only its norms are swapped.
"""

from __future__ import annotations

import pytest
import torch
from enable_helpers import attention_calls
from nn_helpers import assert_equal_in_float64, perturb, run

import fused_attn

try:
    from torchvision import models
except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
    pytest.skip(f"reason: needs torchvision ({error})", allow_module_level=True)


def vit():
    return models.VisionTransformer(16, 4, 2, 2, 24, 32, num_classes=3)


def swin():
    return models.SwinTransformer([4, 4], 12, [2, 2], [2, 4], [2, 2], num_classes=3)


# Model, number of attention calls, number of swapped modules.
@pytest.mark.parametrize(("of", "attentions", "modules"), [(vit, 2, 7), (swin, 0, 11)])
def test_forward_and_backward(of, attentions, modules):
    model = perturb(of().double()).eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    expected = run(model, (images,))
    report = fused_attn.swap_modules(model)
    assert len(report.swapped) == modules and not report.skipped
    with attention_calls() as calls:
        actual = run(model, (images,))
    assert len(calls) == attentions
    assert_equal_in_float64(actual, expected)
