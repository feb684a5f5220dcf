"""Benchmark of time and memory over the sequence length, for encoder layers with equal weights."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from runner import check_model
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_attn
from fused_attn.masks import Mask
from fused_attn.tools.cases import Shape, make_mask, tensors_of

D_MODEL, NUM_HEADS = 256, 4
MASKS = {  # mask expressions for fused_attn.tools.cases.make_mask
    "none": "none",
    "causal": "causal",
    "documents": "causal+documents:512",
    "window": "window:256",
}
MAX_CHECKED = 2048  # float64 scores of longer sequences, which run equal kernels, need gigabytes


@dataclass(frozen=True)
class Length:
    """Batch of one sequence with a mask."""

    name: str  # name of the mask in MASKS
    seqlen: int
    source: str = "one layer, d_model 256, 4 heads, feed-forward 1024, training step"
    quick: bool = False

    @property
    def size(self) -> Shape:
        head_dim = D_MODEL // NUM_HEADS
        return Shape(1, NUM_HEADS, NUM_HEADS, self.seqlen, self.seqlen, head_dim)

    def own_mask(self) -> Mask | None:
        return make_mask(MASKS[self.name], self.size)

    def torch_mask(self) -> Tensor | None:
        """Return the mask for torch.nn, (seqlen, seqlen) bool, True = ignored; None for none."""
        visible, _ = tensors_of(self.own_mask(), self.size, "cpu")
        return None if visible is None else ~visible[0, 0]


SEQLENS = (256, 512, 1024, 2048, 4096)
LENGTHS = [Length(mask, seqlen) for mask in MASKS for seqlen in SEQLENS]
LENGTHS.insert(len(SEQLENS), Length("none", 8192))


@pytest.mark.parametrize("shape", LENGTHS, ids=lambda s: f"{s.name}-L{s.seqlen}")
def test_layer(shape, runner):
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(
        D_MODEL, NUM_HEADS, 4 * D_MODEL, dropout=0.0, batch_first=True
    )
    ours = copy.deepcopy(theirs)
    fused_attn.swap_modules(ours)
    x = torch.randn(1, shape.seqlen, D_MODEL)
    own_mask, torch_mask = shape.own_mask(), shape.torch_mask()

    # With is_causal, torch's layer passes no mask to SDPA, which then runs its causal kernel.
    causal = shape.name == "causal"

    def step(model: Module, mask: Any, context: Any) -> Any:
        def run() -> None:
            with context():
                model(x, src_mask=mask, is_causal=causal).square().mean().backward()
            model.zero_grad()

        return run

    def forward(model: Module) -> Tensor:
        return model(x.to(next(model.parameters()).dtype), src_mask=torch_mask, is_causal=causal)

    if shape.seqlen <= MAX_CHECKED:
        real = torch.ones(1, shape.seqlen, dtype=torch.bool)
        check_model(lambda: ours.eval()(x, src_mask=own_mask), forward, theirs, real)
    ours.train()
    theirs.train()
    runner.time(
        f"length {shape.seqlen}", shape, torch.float32,
        {
            "fused_attn": step(ours, own_mask, contextlib.nullcontext),
            "sdpa": step(theirs, torch_mask, contextlib.nullcontext),
            "eager": step(theirs, torch_mask, lambda: sdpa_kernel(SDPBackend.MATH)),
        },
    )  # fmt: skip
