"""peft's LoRA on a BERT: applied before or after the swap, or merged into the model."""

from __future__ import annotations

import copy

import pytest
import torch
from enable_helpers import attention_calls
from nn_helpers import assert_equal_in_float64, perturb, run, swapped_copy
from small_bert import Logits, small_bert, tokens

peft = pytest.importorskip("peft", reason="reason: needs peft")

LAYERS = 2


def adapted(bert):
    """Return BERT with perturbed LoRA adapters, because newly created ones have no effect."""
    config = peft.LoraConfig(r=2, target_modules=["query", "value", "dense"], lora_dropout=0.0)
    return perturb(peft.get_peft_model(bert, config))


@pytest.mark.parametrize("first", ["adapters", "swap"])
def test_gradients_of_adapters(first):
    bert, inputs = small_bert().double(), tokens()
    torch.manual_seed(1)
    plain = adapted(copy.deepcopy(bert))
    expected = run(Logits(plain), (), inputs)
    torch.manual_seed(1)
    fused = swapped_copy(plain) if first == "adapters" else adapted(swapped_copy(bert))
    with attention_calls() as calls:
        actual = run(Logits(fused), (), inputs)
    assert len(calls) == LAYERS
    assert any("lora" in name for name in actual)
    assert_equal_in_float64(actual, expected)


def test_merged():
    """After merge_and_unload, attention is still fused, and the logits are unchanged."""
    model, inputs = swapped_copy(adapted(small_bert().double())), tokens()
    with torch.no_grad():
        expected = Logits(model)(**inputs)
        merged = model.merge_and_unload()
        with attention_calls() as calls:
            actual = Logits(merged)(**inputs)
    assert len(calls) == LAYERS
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert not any("lora" in name for name, _ in merged.named_parameters())
