"""Constructor and forward arguments of torch.nn that other test files do not cover."""

from __future__ import annotations

import copy

import pytest
import torch
from nn_helpers import (
    BATCH,
    EMBED,
    HEADS,
    LEN_K,
    LEN_Q,
    assert_equal_in_float64,
    causal_bias,
    check_against_torch,
    perturb,
    randn,
    random_mask,
    run,
    sequence,
)

import fused_attn.nn as fnn

LAYER = {"d_model": EMBED, "nhead": HEADS, "dim_feedforward": 16}


@pytest.mark.parametrize("activation", [torch.nn.functional.relu, torch.nn.GELU("tanh")])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_callable_activations(name, activation):
    theirs = getattr(torch.nn, name)(**LAYER, dropout=0.0, activation=activation)
    theirs = perturb(theirs.double())
    # Not a deep copy: copies of torch's decoder layer use relu instead of an activation module.
    ours = getattr(fnn, name).from_torch(theirs)
    args = (randn(LEN_Q, BATCH, EMBED), randn(LEN_K, BATCH, EMBED))
    args = args if "Decoder" in name else args[:1]
    assert_equal_in_float64(run(ours, args), run(theirs, args))


def test_decoder_layer_unbatched():
    theirs = perturb(torch.nn.TransformerDecoderLayer(**LAYER, dropout=0.0).double())
    call = {
        "tgt_mask": random_mask("bool", HEADS, LEN_Q, LEN_Q),
        "memory_mask": random_mask("float", LEN_Q, LEN_K),
        "tgt_key_padding_mask": random_mask("bool", LEN_Q),
        "memory_key_padding_mask": random_mask("float", LEN_K),
    }
    args = (randn(LEN_Q, EMBED), randn(LEN_K, EMBED))
    check_against_torch(theirs, fnn.TransformerDecoderLayer, args, call)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("memory_mask", ["bool", "learned", "causal"])
def test_decoder_stack(memory_mask, batch_first):
    """The fused decoder stack matches torch's with all arguments of forward."""
    kwargs = {"batch_first": batch_first}
    layer = torch.nn.TransformerDecoderLayer(**LAYER, dropout=0.0, **kwargs)
    theirs = perturb(torch.nn.TransformerDecoder(layer, 2, torch.nn.LayerNorm(EMBED)).double())
    causal, hint = causal_bias(LEN_Q), memory_mask == "causal"
    call = {
        "tgt_mask": causal,
        "tgt_key_padding_mask": random_mask("float", BATCH, LEN_Q),
        "memory_mask": causal if hint else random_mask(memory_mask, LEN_Q, LEN_Q),
        "memory_key_padding_mask": random_mask("float", BATCH, LEN_Q),
        "tgt_is_causal": hint or None,
        "memory_is_causal": hint,
    }
    args = (sequence(kwargs, LEN_Q), sequence(kwargs, LEN_Q))
    check_against_torch(theirs, fnn.TransformerDecoder, args, call)


@pytest.mark.parametrize("hinted", [False, True])
def test_transformer_with_every_mask_and_hint(hinted):
    theirs = perturb(torch.nn.Transformer(EMBED, HEADS, 1, 1, 16, dropout=0.0).double())
    mask, call = causal_bias(LEN_Q), {}
    for name in ("src", "tgt", "memory"):
        full = random_mask("float", BATCH * HEADS, LEN_Q, LEN_Q)
        call[f"{name}_mask"] = mask if hinted else full
        call[f"{name}_key_padding_mask"] = random_mask("float", BATCH, LEN_Q)
        call[f"{name}_is_causal"] = hinted
    args = (randn(LEN_Q, BATCH, EMBED), randn(LEN_Q, BATCH, EMBED))
    check_against_torch(theirs, fnn.Transformer, args, call)


def test_transformer_of_custom_stacks():
    """fnn.Transformer converts custom stacks of torch.nn, and matches torch with its state_dict."""
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(**LAYER, dropout=0.0), 1)
    layer = torch.nn.TransformerDecoderLayer(**LAYER, dropout=0.0)
    decoder = torch.nn.TransformerDecoder(layer, 1)
    kwargs = {"d_model": EMBED, "nhead": HEADS}
    theirs = torch.nn.Transformer(custom_encoder=encoder, custom_decoder=decoder, **kwargs).double()
    ours = fnn.Transformer(
        custom_encoder=copy.deepcopy(encoder), custom_decoder=copy.deepcopy(decoder), **kwargs
    )
    assert type(ours.decoder) is fnn.TransformerDecoder
    ours.load_state_dict(perturb(theirs).state_dict())
    args = (randn(LEN_K, BATCH, EMBED), randn(LEN_Q, BATCH, EMBED))
    assert_equal_in_float64(run(ours.double(), args), run(theirs, args))
