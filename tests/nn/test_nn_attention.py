"""MultiheadAttention against torch.nn: constructor options, masks, layouts and errors."""

import copy

import pytest
import torch
from nn_helpers import (
    BATCH,
    EMBED,
    HEADS,
    LEN_K,
    LEN_Q,
    assert_within_contract,
    cast,
    causal_bias,
    check_against_torch,
    perturb,
    randn,
    random_mask,
    run,
)

import fused_attn.nn as fnn
from fused_attn import masks

ATTENTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False, "batch_first": True},
    "kdim_vdim": {"kdim": 10, "vdim": 11},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv_zero_attn_kdim": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 10},
}
MASKS = {
    "none": dict,
    "bool": lambda: {"attn_mask": random_mask("bool", LEN_Q, LEN_K)},
    "float": lambda: {"attn_mask": random_mask("float", LEN_Q, LEN_K)},
    "learned": lambda: {"attn_mask": random_mask("learned", LEN_Q, LEN_K)},
    "bool3d": lambda: {"attn_mask": random_mask("bool", BATCH * HEADS, LEN_Q, LEN_K)},
    "learned3d": lambda: {"attn_mask": random_mask("learned", BATCH * HEADS, LEN_Q, LEN_K)},
    "padding": lambda: {"key_padding_mask": random_mask("bool", BATCH, LEN_K)},
    "float_padding": lambda: {"key_padding_mask": random_mask("learned", BATCH, LEN_K)},
    "bool+padding": lambda: {
        "attn_mask": random_mask("bool", LEN_Q, LEN_K),
        "key_padding_mask": random_mask("bool", BATCH, LEN_K),
    },
    "learned3d+float_padding": lambda: {
        "attn_mask": random_mask("learned", BATCH * HEADS, LEN_Q, LEN_K),
        "key_padding_mask": random_mask("learned", BATCH, LEN_K),
    },
}


def attention(**options):
    return perturb(torch.nn.MultiheadAttention(EMBED, HEADS, **options).double())


def attention_inputs(module, batched=True):
    inputs = (LEN_Q, module.embed_dim), (LEN_K, module.kdim), (LEN_K, module.vdim)
    if not batched:
        return tuple(randn(length, width) for length, width in inputs)
    if module.batch_first:
        return tuple(randn(BATCH, length, width) for length, width in inputs)
    return tuple(randn(length, BATCH, width) for length, width in inputs)


@pytest.mark.sampled(
    "one constructor runs with all masks, and two masks run with all constructors",
    constructor=[name for name in ATTENTIONS if name != "bias_kv_zero_attn_kdim"],
    mask=[name for name in MASKS if name not in ("none", "learned3d+float_padding")],
)
@pytest.mark.parametrize("need_weights", [False, True], ids=["out", "weights"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("constructor", ATTENTIONS)
def test_attention(constructor, mask, need_weights):
    theirs = attention(**ATTENTIONS[constructor])
    kwargs = {**MASKS[mask](), "need_weights": need_weights}
    check_against_torch(theirs, fnn.MultiheadAttention, attention_inputs(theirs), kwargs)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("constructor", ["plain", "bias_kv"])
def test_attention_unbatched(constructor, average):
    theirs = attention(**ATTENTIONS[constructor])
    kwargs = {
        "attn_mask": random_mask("learned", HEADS, LEN_Q, LEN_K),
        "key_padding_mask": random_mask("float", LEN_K),
        "average_attn_weights": average,
    }
    args = attention_inputs(theirs, batched=False)
    check_against_torch(theirs, fnn.MultiheadAttention, args, kwargs)


def test_attention_with_a_shared_query_and_key():
    x, value = randn(LEN_Q, BATCH, EMBED), randn(LEN_Q, BATCH, EMBED)
    check_against_torch(attention(), fnn.MultiheadAttention, (x, x, value))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("constructor", ["plain", "bias_kv", "zero_attn"])
def test_attention_is_causal(constructor, padding, need_weights):
    theirs = attention(**ATTENTIONS[constructor])
    query, _, _ = attention_inputs(theirs)
    kwargs = {"attn_mask": causal_bias(LEN_Q), "need_weights": need_weights}
    if padding:
        kwargs["key_padding_mask"] = random_mask("float", BATCH, LEN_Q)
    check_against_torch(
        theirs,
        fnn.MultiheadAttention,
        (query, query, query),
        {**kwargs, "is_causal": True},
        truth_kwargs=kwargs,  # torch's hint would also mask the appended keys
    )


@pytest.mark.parametrize("hinted", ["nan", None])
def test_is_causal_does_not_read_the_mask(hinted):
    """With is_causal=True, a mask is neither required nor read, unless it requires grad."""
    ours = fnn.MultiheadAttention.from_torch(attention())
    x = randn(LEN_Q, BATCH, EMBED)
    hinted = hinted and torch.full((LEN_Q, LEN_Q), float("nan"), dtype=torch.float64)
    out, _ = ours(x, x, x, attn_mask=hinted, is_causal=True, need_weights=False)
    expected, _ = ours(x, x, x, attn_mask=causal_bias(LEN_Q), need_weights=False)
    torch.testing.assert_close(out, expected)
    learned = randn(LEN_Q, LEN_Q)
    out, _ = ours(x, x, x, attn_mask=learned, is_causal=True, need_weights=False)
    out.sum().backward()
    assert learned.grad.abs().sum() > 0


def test_attention_with_a_fused_attn_mask():
    ours = fnn.MultiheadAttention.from_torch(attention(batch_first=True))
    x = randn(BATCH, LEN_Q, EMBED)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = ours(x, x, x, attn_mask=causal_bias(LEN_Q), key_padding_mask=padded)
    padding = masks.padding(torch.tensor([5, 3]))
    for call in (
        {"attn_mask": masks.causal() & padding},
        {"attn_mask": masks.causal(), "key_padding_mask": padded},
        {"attn_mask": padding, "is_causal": True},
    ):
        torch.testing.assert_close(ours(x, x, x, **call), expected)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_attention_fully_masked(dtype, need_weights):
    """The output of padded sequences and fully masked queries is out_proj's bias, never NaN.

    Their attention weights are 0, and all gradients are finite.
    """
    ours = perturb(fnn.MultiheadAttention(EMBED, HEADS, batch_first=True)).to(dtype)
    x = randn(BATCH, LEN_Q, EMBED, dtype=dtype)
    padding = torch.tensor([[False] * LEN_Q, [True] * LEN_Q])
    attn_mask = torch.zeros(LEN_Q, LEN_Q, dtype=torch.bool)
    attn_mask[2] = True
    out, weights = ours(
        x, x, x, padding, attn_mask=attn_mask, need_weights=need_weights, average_attn_weights=False
    )
    expected = ours.out_proj.bias.detach().expand(LEN_Q, EMBED)
    assert torch.equal(out[1].detach(), expected)
    assert torch.equal(out[0, 2].detach(), expected[2])
    assert not torch.equal(out[0, 1].detach(), expected[1])
    if need_weights:
        assert not weights[1].any() and not weights[0, :, 2].any()
        assert torch.allclose(weights[0, :, 1].sum(-1), torch.ones(HEADS, dtype=dtype), atol=2e-2)
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = out.sum() if weights is None else out.sum() + weights.square().sum()
        loss.backward()
    assert not x.grad[1].any()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


@pytest.mark.parametrize("need_weights", [False, True])
def test_nan_in_padded_keys_has_no_effect(need_weights):
    ours = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True).double()
    query, memory = randn(BATCH, LEN_Q, EMBED), randn(BATCH, LEN_K, EMBED, grad=False)
    padding = torch.tensor([[False] * 7, [False] * 3 + [True] * 4])
    expected = ours(query, memory, memory, padding)
    memory[padding] = float("nan")
    out, weights = ours(query, memory, memory, padding, need_weights=need_weights)
    torch.testing.assert_close(out, expected[0])
    if need_weights:
        torch.testing.assert_close(weights, expected[1])
        out = out.sum() + weights.square().sum()
    out.sum().backward()
    assert query.grad.isfinite().all()


def test_attention_dropout():
    ours = fnn.MultiheadAttention(EMBED, HEADS, dropout=0.5).double()
    x = randn(64, BATCH, EMBED)

    def outputs(seed):
        torch.manual_seed(seed)
        return ours(x, x, x, need_weights=False)[0]

    assert torch.equal(outputs(1), outputs(1))
    assert not torch.equal(outputs(1), outputs(2))
    ours.eval()
    assert torch.equal(outputs(1), outputs(2))
    ours.train()
    ours.dropout = 1.0
    assert torch.equal(outputs(1), ours.out_proj.bias.expand(64, BATCH, EMBED))


def test_attention_under_autocast():
    theirs = perturb(torch.nn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True))
    args = cast(attention_inputs(theirs), torch.float32)
    kwargs = {
        "key_padding_mask": random_mask("float", BATCH, LEN_K).float(),
        "need_weights": False,
    }
    double = copy.deepcopy(theirs).double()
    truth = run(double, cast(args, torch.float64), cast(kwargs, torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(theirs, args, kwargs)
        actual = run(fnn.MultiheadAttention.from_torch(theirs), args, kwargs)
    assert_within_contract(actual, eager, truth)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m(x[0, 0], x, x), "query must have 3 dimensions"),
        (lambda m, x: m(x, x[0], x[0]), "key must have 3 dimensions"),
        (lambda m, x: m(x, x[..., :3], x), f"key must have {EMBED} features, got"),
        (lambda m, x: m(x, x, x[:, :3]), "value must have the batch size and length of key"),
        (lambda m, x: m(x, x[:1], x[:1]), "key must have batch size 2"),
        (
            lambda m, x: m(x, x, x, attn_mask=torch.zeros(3, 3)),
            r"attn_mask must have shape .*\(5, 5\).*, got \(3, 3\)",
        ),
        (
            lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(5, 2, dtype=torch.bool)),
            r"key_padding_mask must have shape .*\(2, 5\), got \(5, 2\)",
        ),
    ],
)
def test_attention_errors(call, message):
    module = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    with pytest.raises(ValueError, match=message):
        call(module, torch.randn(BATCH, LEN_Q, EMBED))


def test_attention_type_errors():
    module = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    x = torch.randn(BATCH, LEN_Q, EMBED)
    with pytest.raises(TypeError, match="key_padding_mask must be a bool or float tensor"):
        module(x, x, x, key_padding_mask=torch.zeros(BATCH, LEN_Q, dtype=torch.long))
    with pytest.raises(TypeError, match="attn_mask must be a bool or float tensor"):
        module(x, x, x, attn_mask=torch.zeros(LEN_Q, LEN_Q, dtype=torch.uint8))
    module = fnn.MultiheadAttention(EMBED, HEADS, batch_first=True, add_zero_attn=True)
    with pytest.raises(ValueError, match="attn_mask must be a tensor"):
        module(x, x, x, attn_mask=masks.causal())
