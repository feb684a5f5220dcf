"""Small BERT classifier with padded batches and labels to train it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY, BATCH, LENGTH = 50, 4, 9


def small_bert() -> Any:
    """Return a BERT classifier without dropout, so that training is the same on all kernels."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


def tokens(batch: int = BATCH) -> dict[str, Tensor]:
    """Draw random sentences with unequal lengths, padded on the right."""
    lengths = torch.arange(batch) % 4 * 2 + 3
    attention_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = torch.randint(1, VOCABULARY, (batch, LENGTH)) * attention_mask
    return {"input_ids": ids, "attention_mask": attention_mask}


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    """Return learnable labels: 1 if the first token is in the upper half of the vocabulary."""
    return (batch["input_ids"][:, 0] >= VOCABULARY // 2).long()


class Logits(torch.nn.Module):
    """Wrapper that returns only the logits of a model, as a tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits
