"""Defects of masked attention in torch.nn 2.13, and the results of fused_attn.nn.

If an assertion about torch fails with a newer version, torch has fixed the defect, and the
assertion can be removed.
"""

from __future__ import annotations

import copy

import pytest
import torch
from nn_helpers import BATCH, assert_within_contract, cast, causal_bias, perturb, randn, run

import fused_attn.nn as fnn

EMBED, HEADS, LENGTH = 24, 4, 5  # torch's fast path requires an even number of heads
ALL_PADDED = torch.tensor([[False] * LENGTH, [True] * LENGTH])
SOME_PADDED = torch.tensor([[False] * LENGTH, [False] * 3 + [True] * 2])


def attention(**kwargs):
    theirs = perturb(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **kwargs))
    return theirs, fnn.MultiheadAttention.from_torch(theirs)


def test_need_weights_with_a_sequence_of_only_padding():
    """If all keys are padded, torch returns NaN, but fused_attn returns finite results.

    In torch, even a loss on only the other sequence of the batch has NaN gradients.
    """
    theirs, ours = attention()
    x = torch.randn(BATCH, LENGTH, EMBED)
    out, weights = theirs(x, x, x, ALL_PADDED)
    assert out[1].isnan().all()
    assert weights[1].isnan().all()
    out[0].sum().backward()
    assert theirs.in_proj_weight.grad.isnan().any()

    theirs.zero_grad()
    out, weights = ours(x, x, x, ALL_PADDED)
    assert torch.equal(out[1], ours.out_proj.bias.expand(LENGTH, EMBED))
    assert not weights[1].any()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_a_sequence_of_only_padding_in_inference(kind):
    """With all keys padded, torch's inference fast path returns NaN; its slow path does not.

    fused_attn returns the same numbers in inference and with gradients.
    """
    if kind == "attention":
        theirs, ours = (module.eval() for module in attention())

        def call(module):
            return module(x, x, x, ALL_PADDED, need_weights=False)[0][1]
    else:
        theirs = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, batch_first=True).eval()
        ours = fnn.TransformerEncoderLayer.from_torch(theirs)

        def call(module):
            return module(x, src_key_padding_mask=ALL_PADDED)[1]

    x = torch.randn(BATCH, LENGTH, EMBED)
    slow = call(theirs).detach()
    with torch.no_grad():
        fast = call(theirs)
    assert slow.isfinite().all()
    assert fast.isnan().all()

    with_grad = call(ours).detach()
    with torch.no_grad():
        without = call(ours)
    assert torch.equal(with_grad, without)
    torch.testing.assert_close(with_grad, slow)


@pytest.mark.parametrize(
    "appended", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=lambda a: next(iter(a))
)
def test_causal_hint_with_appended_keys(appended):
    """With appended keys, is_causal=True changes the result of torch, but not of fused_attn."""
    theirs, ours = attention(**appended)
    x, mask = torch.randn(BATCH, LENGTH, EMBED), causal_bias(LENGTH, torch.float32)

    def call(module, hint):
        return module(x, x, x, attn_mask=mask, is_causal=hint, need_weights=False)[0]

    expected = call(theirs, False)
    assert (call(theirs, True) - expected).abs().max() > 0.1
    torch.testing.assert_close(call(ours, False), expected)
    torch.testing.assert_close(call(ours, True), expected)


def test_padded_rows_of_an_encoder():
    """torch zeroes padded rows only in inference, on its packed path; fused_attn always does."""
    layer = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 16, batch_first=True)
    theirs = torch.nn.TransformerEncoder(layer, 2).eval()
    ours = fnn.TransformerEncoder.from_torch(theirs)
    x = torch.randn(BATCH, LENGTH, EMBED)
    slow = theirs(x, src_key_padding_mask=SOME_PADDED).detach()
    with torch.no_grad():
        fast = theirs(x, src_key_padding_mask=SOME_PADDED)
    torch.testing.assert_close(fast[~SOME_PADDED], slow[~SOME_PADDED])
    assert not fast[SOME_PADDED].any()
    assert slow[SOME_PADDED].all()

    with_grad = ours(x, src_key_padding_mask=SOME_PADDED).detach()
    with torch.no_grad():
        without = ours(x, src_key_padding_mask=SOME_PADDED)
    assert torch.equal(with_grad, without)
    torch.testing.assert_close(with_grad, slow.masked_fill(SOME_PADDED[..., None], 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["attn_mask", "key_padding_mask"])
def test_float32_mask_with_half_query(which, dtype):
    """With need_weights, torch rejects float32 masks of 16-bit queries; fused_attn accepts them."""
    theirs = perturb(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True)).to(dtype)
    shape = (LENGTH, LENGTH) if which == "attn_mask" else (BATCH, LENGTH)
    args = (randn(BATCH, LENGTH, EMBED, dtype=dtype),) * 3
    call = {which: torch.randn(shape)}
    with pytest.raises(RuntimeError, match="Input dtypes must be the same"):
        theirs(*args, **call)

    double = copy.deepcopy(theirs).double()
    truth = run(double, cast(args, torch.float64), cast(call, torch.float64))
    eager = run(theirs, args, cast(call, dtype))
    assert_within_contract(run(fnn.MultiheadAttention.from_torch(theirs), args, call), eager, truth)
