"""Draws masks.png, by `Mask.plot`: python docs/pictures/draw.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

from fused_attn import masks

LENGTH = 512
MASKS = {
    "causal()": masks.causal(),
    "sliding_window(100, 0)": masks.sliding_window(100, 0),
    "padding([350])": masks.padding([350]),
    "prefix_lm([180])": masks.prefix_lm([180]),
    "documents(ids)": masks.documents(torch.arange(LENGTH) // 150),
    "alibi(slopes)": masks.alibi(torch.tensor([0.02])),
    "dense(bool_tensor)": masks.dense(
        (torch.arange(LENGTH)[:, None] // 64 + torch.arange(LENGTH) // 64) % 3 > 0
    ),
    "bias(float_tensor)": masks.bias(
        torch.cos(torch.arange(LENGTH)[:, None] / 40.0) * torch.sin(torch.arange(LENGTH) / 60.0)
    ),
    "causal() & padding([350]) & sliding_window(200)": masks.causal()
    & masks.padding([350])
    & masks.sliding_window(200),
}


def main() -> None:
    figure, grid = pyplot.subplots(3, 3, figsize=(12, 13), layout="constrained")
    for axes, (name, mask) in zip(grid.flat, MASKS.items(), strict=True):
        mask.plot(LENGTH, axes=axes)
        axes.set_title(f"{name}\n{axes.get_title()}", fontsize=9)
    figure.savefig(Path(__file__).with_name("masks.png"), dpi=72)


if __name__ == "__main__":
    main()
