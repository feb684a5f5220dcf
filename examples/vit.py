"""Train a Vision Transformer on handwritten digits, and show its attention by rollout.

    python examples/vit.py

The model is trained on 4,000 digits of MNIST and tested on 1,000 others. Plots show the attention
of the class token (attention rollout) and the misclassified digits.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", for the model; Abnar and Zuidema
2020, "Quantifying Attention Flow in Transformers", for the rollout.
"""

from __future__ import annotations

import math
import time
from functools import partial

import common
import curves
import data
import fitting
import torch
import torch.nn.functional as F
from positions import LearnedPositionalEmbedding
from terminal import console, table
from torch import Tensor, nn

import fused_attn.nn

MIN_ACCURACY = 0.95
PATCH = 4  # pixels per side; a digit has 7 x 7 patches
D_MODEL, NUM_HEADS, NUM_LAYERS, FEED_FORWARD = 64, 4, 4, 128
BATCH, STEPS, LEARNING_RATE, WEIGHT_DECAY = 64, 2500, 3e-3, 0.05
MAX_DIFFERENCE = 1e-4  # maximum difference of float32 logits


class VisionTransformer(nn.Module):
    """Pre-norm encoder over image patches, which classifies by the first token, the class token.

    Args:
        size: height and width of the images, a multiple of PATCH.
        num_classes: number of classes.

    Source: Dosovitskiy et al. 2021, section 3.1.
    """

    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        # A convolution whose stride equals its kernel size is a linear layer on each patch.
        self.patches = nn.Conv2d(1, D_MODEL, kernel_size=PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(D_MODEL))
        num_tokens = 1 + (size // PATCH) ** 2
        self.positions = LearnedPositionalEmbedding(D_MODEL, num_tokens)
        layer = fused_attn.nn.TransformerEncoderLayer(
            D_MODEL, NUM_HEADS, FEED_FORWARD, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        # In a pre-norm model, no layer normalizes the last residual sum, so add a final norm.
        self.encoder = fused_attn.nn.TransformerEncoder(
            layer, NUM_LAYERS, norm=fused_attn.nn.LayerNorm(D_MODEL)
        )
        self.head = nn.Linear(D_MODEL, num_classes)
        nn.init.normal_(self.positions.weight, std=0.2)  # as large as patches, to train faster
        for parameter in self.encoder.parameters():  # redraw, because the layers start as copies
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def embed(self, images: Tensor) -> Tensor:
        """Embed images (batch, size, size) with positions, to (batch, num_tokens, D_MODEL)."""
        patches = self.patches(images[:, None]).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), 1, D_MODEL)
        return self.positions(torch.cat([class_token, patches], dim=1))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, num_classes) of images (batch, size, size)."""
        return self.head(self.encoder(self.embed(images))[:, 0])


@torch.no_grad()
def attention_rollout(model: VisionTransformer, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of each input token in each output token, if only attention mixes tokens.

    The function runs the layers like the encoder, but with need_weights=True, so that a second
    kernel returns the weights, averaged over the heads. The residual connection adds the identity,
    with the same weight as attention. The matrices of the layers are multiplied.

    Args:
        model: a model in evaluation mode.
        images: (batch, size, size).

    Returns:
        The model's logits, and the rollout (batch, num_tokens, num_tokens), whose rows sum to 1.

    Source: Abnar and Zuidema 2020, section 3, "Attention rollout".
    """
    x = model.embed(images)
    rollout = torch.eye(x.shape[1])
    for layer in model.encoder.layers:
        normed = layer.norm1(x)
        attended, weights = layer.self_attn(normed, normed, normed, need_weights=True)
        normed, x = layer.norm2(attended, residual=x, return_residual=True)
        x = x + layer.linear2(layer.activation(layer.linear1(normed)))
        mixing = weights + torch.eye(x.shape[1])
        rollout = mixing / mixing.sum(-1, keepdim=True) @ rollout
    return model.head(model.encoder.norm(x)[:, 0]), rollout


def augment(images: Tensor) -> Tensor:
    """Rotate each image by up to 15 degrees, scale it by up to 10 %, shift it by up to 2 pixels."""
    turn, scale, right, down = torch.rand(4, len(images)) * 2 - 1
    angle, scale = turn * math.radians(15), 1 + 0.1 * scale
    cos, sin = scale * angle.cos(), scale * angle.sin()
    shift = 2 * 2 / images.shape[-1]  # 2 pixels in coordinates of the grid, which span -1 to 1
    rows = [torch.stack([cos, -sin, right * shift]), torch.stack([sin, cos, down * shift])]
    moves = torch.stack(rows).permute(2, 0, 1)  # (batch, 2, 3)
    grid = F.affine_grid(moves, [len(images), 1, *images.shape[1:]], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def split(labels: Tensor, held_out: int) -> tuple[Tensor, Tensor]:
    """Return indices for training and for the test, which contains `held_out` of each label."""
    train, test = [], []
    for label in labels.unique():
        mixed = (labels == label).nonzero()[:, 0]
        mixed = mixed[torch.randperm(len(mixed))]
        test.append(mixed[:held_out])
        train.append(mixed[held_out:])
    return torch.cat(train), torch.cat(test)


@torch.no_grad()
def predict(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return the most likely class of each image, (batch,)."""
    return torch.cat([model(part).argmax(-1) for part in images.split(500)])


def fit(
    images: Tensor, labels: Tensor, steps: int, title: str, prepare: curves.Prepare = curves.as_is
) -> tuple[VisionTransformer, list[float]]:
    """Train a model on `steps` augmented batches; return the model and the loss of each step."""
    model = prepare(VisionTransformer(images.shape[-1], len(labels.unique())))
    dtype = model.class_token.dtype
    epochs = math.ceil(steps * BATCH / len(labels))
    order = torch.cat([torch.randperm(len(labels)) for _ in range(epochs)])
    losses = fitting.train(
        model.parameters(),
        lambda rows: F.cross_entropy(model(augment(images[rows]).to(dtype)), labels[rows]),
        order.split(BATCH)[:steps],
        fitting.cosine(LEARNING_RATE, warmup=steps // 10 + 1, steps=steps),
        title,
        weight_decay=WEIGHT_DECAY,
    )
    return model.eval(), losses


def main() -> None:
    with common.example("vit", __doc__) as run:
        images, labels = data.digits()
        train, test = split(labels, held_out=10 if run.smoke else 100)
        steps, compared = (4, 2) if run.smoke else (STEPS, 100)
        console.print(f"{len(train)} digits to learn from, {len(test)} others for the test")

        began = time.perf_counter()
        learn = partial(fit, images[train], labels[train])
        model, losses = learn(steps, "training")
        seconds = time.perf_counter() - began
        predicted = predict(model, images[test])
        report_test(run, images[test], labels[test], predicted)
        parameters = sum(p.numel() for p in model.parameters())
        run.figures |= {"train_seconds": round(seconds, 1), "parameters": parameters}
        show_rollout(run, model, images[test], labels[test], predicted)
        pair = curves.compare(run, lambda prepare: learn(compared, "comparing", prepare)[1])
        with run.figure("losses", 1, 2, size=(10, 4)) as (left, right):
            fitting.plot_curves(left, {"training": fitting.smoothed(losses)}, "Smoothed loss")
            fitting.plot_curves(right, pair, f"The first of {compared} steps, on two backends")

        accuracy = run.figures["accuracy"]
        run.require(
            accuracy >= MIN_ACCURACY,
            f"accuracy on {len(test)} held-out digits must be >= {MIN_ACCURACY}, got {accuracy}",
        )
        run.report(f"training took {seconds:.0f} seconds")
        difference = run.figures["rollout"]["max_difference_of_logits"]
        run.require(
            difference <= MAX_DIFFERENCE,
            f"logits of the rollout must be within {MAX_DIFFERENCE} of the model's, got "
            f"{difference:.1e}",
        )


def report_test(run: common.Example, images: Tensor, labels: Tensor, predicted: Tensor) -> None:
    """Report the accuracy and the confusion matrix; plot misclassified digits."""
    count = int(labels.max()) + 1
    # Row: label; column: prediction.
    confusion = torch.bincount(labels * count + predicted, minlength=count**2).view(count, count)
    wrong = (predicted != labels).nonzero()[:, 0]
    accuracy = 1 - len(wrong) / len(labels)
    run.figures |= {"accuracy": round(accuracy, 4), "confusion": confusion.tolist()}
    header = ["digit", *(f"as {label}" for label in range(count))]
    rows = [[label, *(n or "" for n in row)] for label, row in enumerate(confusion.tolist())]
    table(f"Accuracy {accuracy:.1%}: {len(wrong)} of {len(labels)} are wrong", header, rows)
    shown = wrong[:: math.ceil(len(wrong) / 30)][:30] if len(wrong) else wrong
    with run.figure("wrong", 3, 10, size=(10, 3.8)) as axes:
        for axis in axes.flat:
            axis.axis("off")
        for axis, i in zip(axes.flat, shown.tolist(), strict=False):
            axis.imshow(images[i], cmap="gray_r")
            axis.set_title(f"{labels[i]} as {predicted[i]}")


def show_rollout(
    run: common.Example, model: VisionTransformer, images: Tensor, labels: Tensor, predicted: Tensor
) -> None:
    """Plot the attention of the class token, and report the fraction of it that falls on ink."""
    logits, rollout = attention_rollout(model, images)
    with torch.no_grad():
        difference = (logits - model(images)).abs().max().item()
    side = images.shape[-1] // PATCH
    seen = rollout[:, 0, 1:]  # attention of the class token to each patch
    seen = (seen / seen.sum(-1, keepdim=True)).view(-1, side, side)
    ink = F.max_pool2d(images, PATCH) > 0.1
    share, area = (seen * ink).sum((1, 2)).mean().item(), ink.float().mean().item()
    run.report(
        f"attention rollout: {share:.0%} of what the class token takes from patches is of those "
        f"with ink, which are {area:.0%} of all"
    )
    run.figures["rollout"] = {
        "max_difference_of_logits": difference,
        "share_of_ink": round(share, 3),
        "patches_with_ink": round(area, 3),
    }
    first = [(labels == label).nonzero()[0, 0].item() for label in labels.unique()]
    with run.figure("rollout", 2, len(first), size=(12, 2.8)) as axes:
        for (above, below), i in zip(axes.T, first, strict=True):
            above.imshow(images[i], cmap="gray_r")
            above.set_title(f"{labels[i]} as {predicted[i]}")
            below.imshow(images[i], cmap="gray_r")
            pixels = (0, 28, 28, 0)
            below.imshow(seen[i], cmap="jet", alpha=0.5, interpolation="bilinear", extent=pixels)
            above.axis("off")
            below.axis("off")


if __name__ == "__main__":
    main()
