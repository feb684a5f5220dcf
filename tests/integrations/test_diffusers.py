"""diffusers' models with random weights: `enable()` fuses attention, `swap_modules` fuses norms.

Their attention calls torch's `scaled_dot_product_attention`. `swap_modules` does not swap torch's
group norms or diffusers' RMS norms.
"""

from __future__ import annotations

import pytest
import torch
from enable_helpers import taken_over
from nn_helpers import assert_equal_in_float64, perturb, run

import fused_attn

diffusers = pytest.importorskip("diffusers", reason="reason: needs diffusers")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def unet():
    blocks = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, down_block_types=blocks[0], up_block_types=blocks[1],
        block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16,
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    words = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    return model, {
        "sample": random(2, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": random(2, 5, 16),
        "encoder_attention_mask": words,
    }


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    steps, labels = torch.tensor([1, 2]), torch.tensor([3, 4])
    model.transformer_blocks.eval()  # in training mode, the model drops random labels
    return model, {"hidden_states": random(2, 4, 8, 8), "timestep": steps, "class_labels": labels}


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16,
        out_channels=4, qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": random(2, 4, 8, 8),
        "encoder_hidden_states": random(2, 5, 16),
        "pooled_projections": random(2, 16),
        "timestep": torch.tensor([1, 2]),
    }


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": random(2, 16, 4),
        "encoder_hidden_states": random(2, 5, 16),
        "pooled_projections": random(2, 16),
        "timestep": torch.tensor([1.0, 2.0]),
        "img_ids": torch.randint(0, 4, (16, 3)).double(),
        "txt_ids": torch.zeros(5, 3, dtype=torch.float64),
    }


def vae():
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": random(2, 3, 16, 16)}


# Model -> numbers of attention calls, of masked attention calls, of swapped and of skipped norms.
MODELS = {unet: (8, 4, 12, 0), dit: (2, 0, 5, 0), sd3: (2, 0, 8, 8), flux: (2, 0, 12, 0)}
MODELS[vae] = (2, 0, 0, 0)


@pytest.mark.parametrize("of", MODELS, ids=lambda of: of.__name__)
def test_forward_and_backward(of):
    model, inputs = of()
    model, inputs = perturb(model.double()), {**inputs, "return_dict": False}
    expected = run(model, (), inputs)
    report = fused_attn.swap_modules(model)
    with taken_over() as computed:
        actual = run(model, (), inputs)
    masks = sum(mask is not None for _, mask in computed)
    assert (len(computed), masks, len(report.swapped), len(report.skipped)) == MODELS[of]
    assert all("custom norm" in entry.reason for entry in report.skipped)
    assert_equal_in_float64(actual, expected)
