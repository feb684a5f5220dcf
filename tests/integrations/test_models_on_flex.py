"""Swapped models pass structured masks, with blocks to skip, to the backend "flex".

A mock replaces the device: calls reach the backend as on a GPU, and the reference computes them.
"""

from __future__ import annotations

import pytest
import torch

import fused_attn
from fused_attn.backends import flex, reference
from fused_attn.backends.flex import compiled

transformers = pytest.importorskip("transformers", reason="reason: transformers is not installed")
LENGTH = 384  # three blocks of 128


class Recorded:
    """Mask pattern and operands of a call that reached the backend."""

    def __init__(self, variant, operands):
        self.pattern, self.operands = variant.pattern, operands

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
        recorded.append(Recorded(variant, operands))
        return reference.attention(latest[0])

    real = flex.variant_of
    monkeypatch.setattr(flex, "variant_of", variant_of)
    monkeypatch.setattr(compiled, "run", run)
    monkeypatch.setattr(flex.FlexBackend, "unsupported", lambda self, problem: [])
    return recorded


def compared(model, **inputs):
    """Return a model's last hidden states after the swap, on backend "flex", and before it."""
    model = model.eval()
    want = model(**inputs).last_hidden_state
    fused_attn.swap_modules(model)
    with fused_attn.use_backend("flex"):
        return model(**inputs).last_hidden_state, want


def test_llama_with_packed_documents(calls):
    """Packed documents reach the backend as intervals; blocks of other documents are skipped."""
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    positions = torch.cat([torch.arange(n) for n in (100, 156, 128)])[None]
    tokens = torch.randint(60, (1, LENGTH))
    got, want = compared(
        transformers.LlamaModel(config), input_ids=tokens, position_ids=positions, use_cache=False
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2
    for call in calls:  # neither a dense mask nor document numbers
        assert call.operands.dense is None and call.operands.query_documents is None
        assert call.skipped == 5  # 3 above the diagonal, 2 of other documents
    assert calls[0].operands.lists.kv_indices is calls[1].operands.lists.kv_indices


def test_bert_with_padding(calls):
    """BERT's padding is passed without a dense mask, and fully padded blocks are skipped."""
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=LENGTH, attn_implementation="eager",
    )  # fmt: skip
    real = torch.arange(LENGTH) < torch.tensor([[256], [LENGTH]])
    tokens = torch.randint(60, (2, LENGTH))
    got, want = compared(
        transformers.BertModel(config), input_ids=tokens, attention_mask=real.long()
    )
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
    assert len(calls) == 2
    for call in calls:
        assert call.operands.dense is None
        assert call.skipped > 0


def test_t5_with_a_relative_bias(calls):
    """T5's position bias becomes a score_mod; no mask is dense, and blocks are skipped."""
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2,
        dropout_rate=0.0, attn_implementation="eager",
    )  # fmt: skip
    tokens = torch.randint(60, (2, LENGTH))
    real = torch.arange(LENGTH) < torch.tensor([[100], [LENGTH]])
    got, want = compared(
        transformers.T5Model(config), input_ids=tokens, attention_mask=real.long(),
        decoder_input_ids=tokens, use_cache=False,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(calls) == 3  # encoder, decoder, and cross-attention
    assert sum(bool(call.pattern.bias) for call in calls) >= 2
    assert all(call.operands.dense is None for call in calls)
    assert all(call.skipped > 0 for call in calls)
