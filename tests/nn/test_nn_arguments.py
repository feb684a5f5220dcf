"""Constructor and forward arguments of torch.nn that other test files do not cover."""

from __future__ import annotations

import copy
import inspect

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

CLASSES = [
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerDecoder",
    "Transformer",
]
LAYER = {"d_model": EMBED, "nhead": HEADS, "dim_feedforward": 16}


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_of_forward_are_those_of_torch(name):
    theirs, ours = getattr(torch.nn, name), getattr(fnn, name)
    expected = inspect.signature(theirs.forward).parameters.values()
    actual = inspect.signature(ours.forward).parameters.values()
    assert [(p.name, p.kind, p.default) for p in actual] == [
        (p.name, p.kind, p.default) for p in expected
    ]


@pytest.mark.parametrize("layers", ["encoder", "decoder"])
def test_stacks_of_the_same_seed(layers):
    """With the same seed, our stacks and torch's have equal parameters: both copy the layer."""
    states = []
    for namespace in (torch.nn, fnn):
        torch.manual_seed(3)
        name = f"Transformer{layers.title()}"
        layer = getattr(namespace, f"{name}Layer")(**LAYER)
        stack = getattr(namespace, name)(layer, 2, norm=namespace.LayerNorm(EMBED))
        states.append(stack.state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("activation", [torch.nn.functional.relu, torch.nn.GELU("tanh")])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_callable_activations(name, activation):
    theirs = getattr(torch.nn, name)(**LAYER, dropout=0.0, activation=activation)
    theirs = perturb(theirs.double())
    # Not a deep copy: in a copy of torch's decoder layer, relu replaces an activation module.
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
@pytest.mark.parametrize("kind", ["bool", "learned"])
@pytest.mark.parametrize("hint", [None, True])
def test_decoder_stack(hint, kind, batch_first):
    """The fused decoder stack matches torch's when every argument of forward is given.

    With hints, memory_mask is causal too, because memory_is_causal=True requires a causal mask.
    """
    kwargs = {"batch_first": batch_first}
    layer = torch.nn.TransformerDecoderLayer(**LAYER, dropout=0.0, **kwargs)
    theirs = perturb(torch.nn.TransformerDecoder(layer, 2, torch.nn.LayerNorm(EMBED)).double())
    causal = causal_bias(LEN_Q)
    call = {
        "tgt_mask": causal,
        "tgt_key_padding_mask": random_mask("float", BATCH, LEN_Q),
        "memory_mask": causal if hint else random_mask(kind, LEN_Q, LEN_Q),
        "memory_key_padding_mask": random_mask("float", BATCH, LEN_Q),
        "tgt_is_causal": hint,
        "memory_is_causal": bool(hint),
    }
    args = (sequence(kwargs, LEN_Q), sequence(kwargs, LEN_Q))
    check_against_torch(theirs, fnn.TransformerDecoder, args, call)


@pytest.mark.parametrize("hinted", [False, True])
def test_transformer_with_every_mask_and_hint(hinted):
    theirs = perturb(torch.nn.Transformer(**LAYER, num_encoder_layers=1, num_decoder_layers=1,
                                          dropout=0.0).double())  # fmt: skip
    mask = causal_bias(LEN_Q)
    call = {
        f"{name}_mask": mask if hinted else random_mask("float", BATCH * HEADS, LEN_Q, LEN_Q)
        for name in ("src", "tgt", "memory")
    }
    call |= {
        f"{name}_key_padding_mask": random_mask("float", BATCH, LEN_Q)
        for name in ("src", "tgt", "memory")
    }
    call |= {f"{name}_is_causal": hinted for name in ("src", "tgt", "memory")}
    args = (randn(LEN_Q, BATCH, EMBED), randn(LEN_Q, BATCH, EMBED))
    check_against_torch(theirs, fnn.Transformer, args, call)


def test_transformer_of_custom_stacks():
    """fnn.Transformer converts custom stacks of torch.nn, loads a state_dict and matches torch."""
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
