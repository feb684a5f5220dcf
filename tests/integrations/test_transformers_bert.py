"""Hugging Face BERT after a swap, and the attention function that its layers call."""

import pytest
import torch
from nn_helpers import assert_within_contract, swapped_copy

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import BertConfig, BertModel  # noqa: E402
from transformers.models.bert import modeling_bert  # noqa: E402

from fused_attn import masks  # noqa: E402
from fused_attn.integrations import transformers as integration  # noqa: E402
from fused_attn.swap import swap_modules  # noqa: E402
from fused_attn.tools.compare import compare  # noqa: E402

BATCH, LENGTH = 3, 9


def bert():
    """Return a small BERT with sdpa attention, in training mode, without dropout."""
    config = BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config)


def inputs():
    ids = torch.randint(1, 50, (BATCH, LENGTH))
    attention_mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    attention_mask[1, 5:] = 0  # right padding
    attention_mask[2, :3] = 0  # left padding
    return {"input_ids": ids, "attention_mask": attention_mask}


def test_bert_compare(monkeypatch):
    exact = modeling_bert.eager_attention_forward
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return exact(*args, **kwargs)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", counted)
    report = compare(bert(), **inputs(), remove_padding=False)
    assert report.ok, str(report)
    names = {row.name for row in report.rows}
    assert {"encoder.layer.0.attention.self", "encoder.layer.1", "embeddings.LayerNorm"} <= names
    assert "output.last_hidden_state" in names
    assert len(calls) == 2 * 3, "each layer should run once in float64 and twice in float32"


def test_bert_with_a_fully_padded_sequence():
    model, kwargs = swapped_copy(bert()), inputs()
    kwargs["attention_mask"][0] = 0
    out = model(**kwargs).last_hidden_state
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_bert_with_a_4d_mask_of_the_user():
    model, ids = bert().double(), inputs()["input_ids"]
    visible = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.6
    visible[..., 0] = True
    bias = torch.zeros(visible.shape, dtype=torch.float64).masked_fill_(~visible, float("-inf"))
    fused = swapped_copy(model)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=bias).last_hidden_state
    for mask in (bias, visible):
        actual = fused(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(actual, expected)


# ---- swapping -----------------------------------------------------------------------------------


def test_swapping_twice_and_comparing_a_swapped_model():
    model = bert()
    assert "BertModel, sdpa attention" in str(swap_modules(model))
    again = swap_modules(model)
    assert not again.swapped
    assert "(the model): its attention was already fused" in str(again)
    assert "modules that were already fused: 11" in str(again)
    with pytest.raises(ValueError, match="got one with fused modules"):
        compare(model, **inputs())


# ---- the attention function ---------------------------------------------------------------------


PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)


def attend(
    module=None, query_heads=3, attention_mask=None, length=4, dtype=torch.float32, **kwargs
):
    """Return the output of the attention function, and its random query, key and value."""
    torch.manual_seed(1)
    query = torch.randn(2, query_heads, length, 8).to(dtype)
    key, value = torch.randn(2, 3, 6, 8).to(dtype), torch.randn(2, 3, 6, 5).to(dtype)
    module = torch.nn.Module() if module is None else module
    out, weights = integration.attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    assert weights is None
    assert out.shape == (2, length, query_heads, 5)
    assert out.is_contiguous()
    return out, (query, key, value)


def reference(query, key, value, mask=None, **kwargs):
    gqa = query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=gqa, **kwargs
    ).transpose(1, 2)


def test_attention_scaling_and_gqa():
    out, qkv = attend(is_causal=False, query_heads=6, scaling=0.7)
    torch.testing.assert_close(out, reference(*qkv, scale=0.7))


def test_attention_softcap():
    out, (query, key, value) = attend(is_causal=False, softcap=0.5)
    scores = 0.5 * torch.tanh(query @ key.transpose(-2, -1) / 8**0.5 / 0.5)
    torch.testing.assert_close(out, (scores.softmax(-1) @ value).transpose(1, 2))


def test_attention_causality_of_argument_and_module():
    module = torch.nn.Module()
    for is_causal, attribute, expected in (
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (None, None, True),
    ):
        module.__dict__.pop("is_causal", None)
        if attribute is not None:
            module.is_causal = attribute
        out, qkv = attend(module, is_causal=is_causal)
        torch.testing.assert_close(out, reference(*qkv, is_causal=expected))
    out, qkv = attend(length=1, is_causal=True)  # the last token of the sequence
    torch.testing.assert_close(out, reference(*qkv))


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_attention_2d_mask_is_padding(dtype):
    out, qkv = attend(attention_mask=PADDING.to(dtype), is_causal=False)
    torch.testing.assert_close(out, reference(*qkv, PADDING[:, None, None, :]))
    # A padding mask does not replace is_causal.
    out, qkv = attend(attention_mask=PADDING[:1].to(dtype).expand(2, 6), is_causal=True)
    mask = PADDING[:1, None, None, :] & torch.ones(4, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(out, reference(*qkv, mask))


def test_attention_4d_mask_is_complete():
    mask = torch.rand(2, 1, 4, 6) < 0.6
    mask[..., 0] = True
    bias = torch.randn(2, 1, 4, 6)
    for given, dense in ((mask, mask), (bias, bias), (masks.dense(mask), mask)):
        out, qkv = attend(attention_mask=given, is_causal=True)
        torch.testing.assert_close(out, reference(*qkv, dense))


def attend_with_sinks(query, key, value, mask, sinks):
    """Return attention in which a sink acts as one more key, with the given score and value 0."""
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 6, 4, 1)], dim=-1)
    return (scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_sinks(dtype):
    mask = torch.rand(2, 1, 4, 6) < 0.6
    mask[0, 0, 0] = False  # only the sink is visible, so the output is 0
    sinks, weight = torch.randn(6).to(dtype), torch.randn(2, 4, 6, 5).to(dtype)

    def result(function, dtype):
        leaf = sinks.to(dtype, copy=True).requires_grad_()
        out = function(leaf)
        (out * weight.to(dtype)).sum().backward()
        return {"out": out.detach(), "grad": leaf.grad}

    def fused(leaf):
        return attend(query_heads=6, attention_mask=mask, s_aux=leaf, dtype=dtype)[0]

    def eager(leaf):
        return attend_with_sinks(*(t.to(leaf.dtype) for t in qkv), mask, leaf)

    _, qkv = attend(query_heads=6, is_causal=False, dtype=dtype)
    actual = result(fused, dtype)
    assert_within_contract(actual, result(eager, dtype), result(eager, torch.float64))
    assert (actual["out"][0, 0] == 0).all()


def test_attention_position_bias():
    bias, key_mask = torch.randn(1, 3, 4, 6), PADDING[:, None, None, :]
    for options, visible in (
        ({"is_causal": False}, torch.tensor(True)),
        ({"is_causal": True}, torch.ones(4, 6, dtype=torch.bool).tril()),
        ({"attention_mask": key_mask}, key_mask),
    ):
        out, qkv = attend(position_bias=bias, **options)
        expected = reference(*qkv, bias.masked_fill(~visible, float("-inf")))
        torch.testing.assert_close(out, expected)


def test_attention_raises_errors_for_unsupported_arguments():
    with pytest.raises(NotImplementedError, match="block_indices, which selects the blocks"):
        attend(block_indices=torch.zeros(3))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        attend(cu_seq_lens_q=torch.tensor([0, 2, 4]), use_cache=True)
    with pytest.raises(NotImplementedError, match="sliding_window 3"):
        attend(sliding_window=3)
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        attend(attention_mask=torch.ones(4))
    attend(position_ids=torch.arange(4), s_aux=None, sliding_window=6)
    attend(cu_seq_lens_q=torch.tensor([0, 4]))  # one sequence
    attend(sliding_window=3, is_causal=False)  # as in DiffusionGemma's decoder: all keys


def test_bert_returns_no_attention_weights_as_with_sdpa():
    model = bert()
    kwargs = {**inputs(), "output_attentions": True}
    of_sdpa = model(**kwargs).attentions
    swap_modules(model)
    with pytest.warns(UserWarning, match='set_attn_implementation."eager"'):
        out = model(**kwargs)
    assert out.attentions == of_sdpa == ()


def test_models_without_attention_interface_are_skipped(monkeypatch):
    model = bert()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    report = swap_modules(model)
    assert model.config._attn_implementation == "sdpa"
    assert "AttentionInterface" in report.skipped[0].reason
    model(**inputs())
