"""Models with torchao's int8 weights, swapped before or after the quantization."""

from __future__ import annotations

import copy

import pytest
import torch
from enable_helpers import attention_calls
from small_bert import Logits, small_bert, tokens

import fused_attn

quantization = pytest.importorskip("torchao.quantization", reason="reason: needs torchao")


def quantized(model: torch.nn.Module) -> torch.nn.Module:
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


PADDED = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])


def encoder() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("first", ["int8", "swap"])
@pytest.mark.parametrize("library", ["torch.nn", "transformers"])
def test_results_are_those_of_eager(library, first):
    if library == "torch.nn":
        model, inputs = encoder(), {"src": torch.randn(2, 7, 32), "src_key_padding_mask": PADDED}
    else:
        model, inputs = Logits(small_bert()), tokens()
    other = copy.deepcopy(model.eval())
    steps = [quantized, fused_attn.swap_modules]
    for step in steps if first == "int8" else steps[::-1]:
        step(other)
    with torch.no_grad():
        expected = quantized(model)(**inputs)
        with attention_calls() as calls:
            actual = other(**inputs)
    assert len(calls) == 2
    if library == "torch.nn":  # swapped encoders return 0 in padded rows
        actual, expected = actual[~PADDED], expected[~PADDED]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
