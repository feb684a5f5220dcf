"""examples/vit.py: training, patch embedding, attention rollout and the split of the digits."""

import pytest
import torch
from example_runs import run_example

import fused_attn

# isort: split
import vit


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vit.VisionTransformer(28, 10).eval()


@pytest.mark.thorough
def test_smoke(tmp_path):
    printed, figures = run_example("vit", tmp_path)
    assert 0 <= figures["accuracy"] <= 1
    assert torch.tensor(figures["confusion"]).sum(1).tolist() == [10] * 10
    assert figures["curves"]["holds"]
    assert figures["rollout"]["max_difference_of_logits"] < vit.MAX_DIFFERENCE
    assert 0 < figures["rollout"]["share_of_ink"] < 1
    assert "4900 digits to learn from, 100 others" in printed
    for name in ("losses", "rollout", "wrong"):
        assert (tmp_path / f"vit_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_patches_are_embedded_by_one_linear_layer(model):
    images = torch.rand(2, 28, 28)
    unfolded = torch.nn.functional.unfold(images[:, None], vit.PATCH, stride=vit.PATCH)
    expected = unfolded.transpose(1, 2) @ model.patches.weight.flatten(1).T + model.patches.bias
    positions = model.positions.weight
    tokens = model.embed(images)
    torch.testing.assert_close(tokens[:, 1:], expected + positions[1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tokens[0, 0], model.class_token + positions[0])


def test_layers_are_initialized_differently(model):
    first, second = (layer.linear1.weight for layer in model.encoder.layers[:2])
    assert not torch.equal(first, second)


def test_rollout(model):
    images = torch.rand(3, 28, 28)
    logits, rollout = vit.attention_rollout(model, images)
    torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rollout.sum(-1), torch.ones(3, 50), atol=1e-5, rtol=0)
    assert (rollout >= 0).all()
    # The residual connection counts as half of each layer.
    assert (rollout.diagonal(dim1=1, dim2=2) > 0.5**vit.NUM_LAYERS).all()
    with fused_attn.use_backend("eager"):
        torch.testing.assert_close(rollout, vit.attention_rollout(model, images)[1])


def test_rollout_of_one_layer_is_the_mean_of_weights_and_identity(model, monkeypatch):
    monkeypatch.setattr(model.encoder, "layers", model.encoder.layers[:1])
    images = torch.rand(2, 28, 28)
    (layer,) = model.encoder.layers
    normed = layer.norm1(model.embed(images))
    query, key, _ = layer.self_attn._project(normed, normed, normed)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1).mean(1)
    _, rollout = vit.attention_rollout(model, images)
    torch.testing.assert_close(rollout, (weights + torch.eye(50)) / 2, atol=1e-5, rtol=1e-5)


def test_split():
    labels = torch.arange(10).repeat_interleave(50)
    train, test = vit.split(labels, held_out=10)
    assert labels[test].bincount().tolist() == [10] * 10
    assert sorted(torch.cat([train, test]).tolist()) == list(range(500))
