"""Models whose encoder stacks can remove padding, with or without padded rows in the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_bert import small_bert, tokens
from torch import Tensor

from fused_attn.integrations.transformers import encoders
from fused_attn.nn import transformer
from fused_attn.nn.packing import Packing

BATCH, LENGTH, WIDTH = 4, 9, 24
IGNORED = torch.arange(LENGTH) >= torch.tensor([[3], [5], [7], [9]])
OPTION = "swap_modules(model, remove_padding=False)"


class Pooled(torch.nn.Module):
    """torch.nn encoder stack with mean pooling, over all rows or with padded rows set to 0."""

    def __init__(self, real_only: bool = False, norm: bool = True, **kwargs: Any) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, **kwargs}
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 32, **options)
        last = torch.nn.LayerNorm(WIDTH) if norm else None
        self.encoder = torch.nn.TransformerEncoder(layer, 2, last)
        for parameter in self.encoder.parameters():  # biases of a new norm would be 0
            torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.5, 0.2)
        self.real_only = real_only

    def forward(self, src: Tensor) -> Tensor:
        out = self.encoder(src, src_key_padding_mask=IGNORED)
        return (out.masked_fill(IGNORED[..., None], 0.0) if self.real_only else out).mean(1)


class PooledBert(torch.nn.Module):
    """Hugging Face BERT with mean pooling, over all rows or with padded rows set to 0."""

    def __init__(self, real_only: bool = False) -> None:
        super().__init__()
        self.bert, self.real_only = small_bert().bert, real_only

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return (out * attention_mask[..., None] if self.real_only else out).mean(1)


# Name of a model -> path of its encoder stack.
STACKS = {"torch": "encoder", "bert": "bert.encoder"}


def made(name: str, **kwargs: Any) -> tuple[Any, tuple[Tensor, ...], dict[str, Tensor]]:
    """Return a new model in training mode, and the args and kwargs to call it with."""
    if name == "torch":
        return Pooled(**kwargs), (torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True),), {}
    pytest.importorskip("transformers", reason="reason: transformers is not installed")
    return PooledBert(**kwargs).train(), (), tokens()


def recorded_packings(monkeypatch: pytest.MonkeyPatch) -> list[Packing | None]:
    """Return a list to which each later run of a stack appends its Packing; None if not packed."""
    seen: list[Packing | None] = []

    def record(module: Any, name: str) -> None:
        real = getattr(module, name)

        def recording(*args: Any, **kwargs: Any) -> Packing | None:
            seen.append(real(*args, **kwargs))
            return seen[-1]

        monkeypatch.setattr(module, name, recording)

    record(transformer, "packing_of")
    record(encoders, "_choose_packing")
    return seen
