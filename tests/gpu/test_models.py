"""fused_attn.nn and swapped models of torch.nn on the default backends of a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import DEVICE, DTYPES
from gpu_models import (
    HEADS,
    IGNORED,
    LENGTH,
    OPTIONS,
    WIDTH,
    Real,
    check,
    encoder,
    findings_of,
    results,
    swapped,
    x,
)
from helpers import deterministic, short
from judging import require
from nn_helpers import perturb

import fused_attn.nn as fnn
from fused_attn.tools import contract


def perturbed(module, training):
    return perturb(module).train(training)


CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
training = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
SELF_MASKS = {
    "none": {},
    "padding": {"key_padding_mask": IGNORED},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "both": {"attn_mask": CAUSAL.isinf(), "key_padding_mask": IGNORED},
}


@training
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", SELF_MASKS)
def test_multihead_attention(name, need_weights, training):
    kwargs = {**SELF_MASKS[name], "need_weights": need_weights}
    if need_weights:
        kwargs.pop("is_causal", None)
    theirs = perturbed(torch.nn.MultiheadAttention(WIDTH, HEADS, **OPTIONS), training)
    fused = fnn.MultiheadAttention.from_torch(copy.deepcopy(theirs))
    check(fused, theirs, (x(),) * 3, kwargs)


@training
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("name", SELF_MASKS)
def test_encoder_layer(name, norm_first, training):
    names = {"key_padding_mask": "src_key_padding_mask", "attn_mask": "src_mask"}
    kwargs = {names.get(k, k): v for k, v in SELF_MASKS[name].items()}
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 64, norm_first=norm_first, **OPTIONS)
    theirs = perturbed(layer, training)
    check(fnn.TransformerEncoderLayer.from_torch(copy.deepcopy(theirs)), theirs, (x(),), kwargs)


@training
def test_transformer(training):
    """A Transformer with padding and a causal mask agrees with torch's."""
    theirs = perturbed(torch.nn.Transformer(WIDTH, HEADS, 1, 1, 64, **OPTIONS), training)
    fused = fnn.Transformer.from_torch(copy.deepcopy(theirs))
    kwargs = {
        "tgt_mask": CAUSAL.isinf(),
        "src_key_padding_mask": IGNORED,
        "tgt_key_padding_mask": IGNORED,
        "memory_key_padding_mask": IGNORED,
    }
    models = (Real(model, ~IGNORED) for model in (fused, theirs))
    check(*models, (x(), x()), kwargs)


@training
@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
def test_swapped_encoder(remove_padding, training):
    theirs = encoder().train(training)
    fused = swapped(theirs, remove_padding=remove_padding)
    models = (Real(model, ~IGNORED) for model in (fused, theirs))
    check(*models, (x(),), {"src_key_padding_mask": IGNORED})


@torch.no_grad()
def test_inference_of_a_swapped_encoder():
    """A swapped encoder agrees with torch's inference path on the same device."""
    theirs, tokens = encoder().eval().to(DEVICE), x().detach().to(DEVICE)
    fused, ignored = swapped(theirs), IGNORED.to(DEVICE)
    got, want = (m(tokens, src_key_padding_mask=ignored)[~ignored] for m in (fused, theirs))
    truth = copy.deepcopy(theirs).double()(tokens.double(), src_key_padding_mask=ignored)[~ignored]
    require([contract.judge("out", got, truth, want, gradient=False)], "default")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_training_with_dropout(dtype):
    """Equal seeds give equal, finite gradients, and another seed gives different ones."""
    model, tokens = swapped(encoder(dropout=0.2)).to(DEVICE, dtype), x()
    grads = []
    with deterministic():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            out = model(tokens.to(DEVICE, dtype), src_key_padding_mask=IGNORED.to(DEVICE))
            parameters = list(model.parameters())
            grads.append(torch.autograd.grad(out.float().square().mean(), parameters))
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[1], strict=True))
    assert not torch.equal(grads[0][0], grads[2][0])
    assert all(grad.isfinite().all() for grad in grads[0])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
def test_autocast(dtype):
    """A swapped encoder agrees with torch's under the same autocast."""
    theirs, tokens, kwargs = encoder(), x(), {"src_key_padding_mask": IGNORED}
    fused, theirs = (Real(model, ~IGNORED) for model in (swapped(theirs), theirs))
    truth = results(theirs, (tokens,), kwargs, torch.float64, "cpu")
    with torch.autocast(DEVICE.type, dtype):
        got = results(fused, (tokens,), kwargs, torch.float32, DEVICE)
        eager = results(theirs, (tokens,), kwargs, torch.float32, DEVICE)
    # The expected error of eager is unknown under autocast, so the limits of "sdpa" apply.
    require(findings_of(got, eager, truth), "sdpa")
