"""Swapped models pass structured masks, with blocks to skip, to the backend "flex".

A mock replaces the device: calls reach the backend as on a GPU, and the reference computes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import fused_attn
from fused_attn.backends import flex, reference
from fused_attn.backends.flex import compiled

transformers = pytest.importorskip("transformers", reason="reason: transformers is not installed")
LENGTH = 384  # three blocks of 128


class Recorded(NamedTuple):
    """Mask pattern and operands of a call that reached the backend."""

    pattern: Any
    operands: Any

    @property
    def skipped(self):
        """Number of KV blocks that the first head of the first sequence skips."""
        lists = self.operands.lists
        rows = lists.kv_num_blocks[0, 0] + lists.full_kv_num_blocks[0, 0]
        return rows.numel() * lists.kv_indices.shape[3] - int(rows.sum())


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which each call that reaches the backend is appended as Recorded."""
    recorded, latest = [], []

    def variant_of(call, *options):
        latest[:] = [call]
        return real(call, *options)

    def run(variant, query, key, value, operands):
        recorded.append(Recorded(variant.pattern, operands))
        return reference.attention(latest[0])

    real = flex.variant_of
    monkeypatch.setattr(flex, "variant_of", variant_of)
    monkeypatch.setattr(compiled, "run", run)
    monkeypatch.setattr(flex.FlexBackend, "unsupported", lambda self, problem: [])
    return recorded


SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "attn_implementation": "eager",
}  # fmt: skip


def check(name, config, inputs, real=...):
    """Assert that real tokens have equal hidden states before a swap and after it, on "flex"."""
    config = getattr(transformers, f"{name}Config")(**SMALL | config)
    model = getattr(transformers, f"{name}Model")(config).eval()
    expected = model(**inputs).last_hidden_state
    fused_attn.swap_modules(model)
    with fused_attn.use_backend("flex"):
        actual = model(**inputs).last_hidden_state
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-4)


def test_llama_with_packed_documents(calls):
    """Packed documents reach the backend as intervals; blocks of other documents are skipped."""
    positions = torch.cat([torch.arange(n) for n in (100, 156, 128)])[None]
    inputs = {"input_ids": torch.randint(60, (1, LENGTH)), "position_ids": positions}
    check("Llama", {"num_key_value_heads": 1}, inputs | {"use_cache": False})
    assert len(calls) == 2
    for call in calls:  # neither a dense mask nor document numbers
        assert call.operands.dense is None and call.operands.query_documents is None
        assert call.skipped == 5  # 3 above the diagonal, 2 of other documents
    assert calls[0].operands.lists.kv_indices is calls[1].operands.lists.kv_indices


def test_bert_with_padding(calls):
    """BERT's padding is passed without a dense mask, and fully padded blocks are skipped."""
    real = torch.arange(LENGTH) < torch.tensor([[256], [LENGTH]])
    inputs = {"input_ids": torch.randint(60, (2, LENGTH)), "attention_mask": real.long()}
    check("Bert", {"max_position_embeddings": LENGTH}, inputs, real)
    assert len(calls) == 2
    for call in calls:
        assert call.operands.dense is None
        assert call.skipped > 0


def test_t5_with_a_relative_bias(calls):
    """T5's position bias becomes a score_mod; no mask is dense, and blocks are skipped."""
    tokens = torch.randint(60, (2, LENGTH))
    real = torch.arange(LENGTH) < torch.tensor([[100], [LENGTH]])
    inputs = {"input_ids": tokens, "attention_mask": real.long(), "decoder_input_ids": tokens}
    config = {"d_kv": 16, "d_ff": 48, "num_hidden_layers": 1, "num_decoder_layers": 1}
    check("T5", config, inputs | {"use_cache": False})
    assert len(calls) == 3  # encoder, decoder, and cross-attention
    assert sum(bool(call.pattern.bias) for call in calls) >= 2
    assert all(call.operands.dense is None for call in calls)
    assert all(call.skipped > 0 for call in calls)
