"""Small Hugging Face models on the default backends of a GPU, compared with eager attention."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from devices import DEVICE, DTYPES
from gpu_models import (
    BATCH,
    HEADS,
    IGNORED,
    LENGTH,
    WIDTH,
    Real,
    findings_of,
    moved,
    results,
    swapped,
)
from helpers import short
from judging import require

import fused_attn as fa
from fused_attn.tools import contract

training = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


SIZES = {
    "vocab_size": 50, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def tiny_bert(**kwargs):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**SIZES, **dropout, **kwargs)
    return transformers.BertModel(config, add_pooling_layer=False)


def tiny_llama(**kwargs):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False, **kwargs)
    return transformers.LlamaModel(config)


MODELS = {"bert": tiny_bert, "llama": tiny_llama}
models = pytest.mark.parametrize("name", MODELS)


def token_inputs(side="right"):
    real = ~IGNORED if side == "right" else ~IGNORED.flip(1)
    ids = torch.randint(1, 50, (BATCH, LENGTH)) * real
    return {"input_ids": ids, "attention_mask": real.long()}, real


def check_hf(fused, theirs, side, within=contextlib.nullcontext):
    """Compare a model with its original, which runs eager attention on the same device.

    The float64 reference runs torch's SDPA, because transformers' eager attention always computes
    the softmax in float32, in which the float64 mask of fully masked rows overflows.
    """
    inputs, real = token_inputs(side)
    double = copy.deepcopy(theirs)
    double.set_attn_implementation("sdpa")
    theirs.set_attn_implementation("eager")
    fused, theirs, double = (Real(model, real) for model in (fused, theirs, double))
    truth = results(double, (), inputs, torch.float64, "cpu")
    eager = functools.partial(results, theirs, (), inputs, torch.float32, DEVICE)
    with within():
        got = results(fused, (), inputs, torch.float32, DEVICE)
    require(findings_of(got, eager(), truth, eager), "default")


@models
@training
@pytest.mark.parametrize("side", ["right", "left"])
def test_swapped_hugging_face(name, side, training):
    theirs = MODELS[name]().train(training)
    check_hf(swapped(theirs), theirs, side)


@models
def test_attn_implementation(name):
    fused = MODELS[name](attn_implementation="fused_attn")
    theirs = MODELS[name]()
    theirs.load_state_dict(fused.state_dict())
    assert fused.config._attn_implementation == "fused_attn"
    check_hf(fused, theirs, "right")


@models
def test_enabled(name):
    """Under enabled(), a model that calls torch's SDPA agrees with eager attention."""
    model = MODELS[name](attn_implementation="sdpa")
    check_hf(model, copy.deepcopy(model), "right", fa.enabled)


@models
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@torch.no_grad()
def test_inference_in_16_bits(name, dtype):
    inputs, real = token_inputs()
    theirs = MODELS[name]().to(dtype).eval()
    fused = swapped(theirs)
    double = copy.deepcopy(theirs).double()
    double.set_attn_implementation("sdpa")
    theirs.set_attn_implementation("eager")
    given = {k: moved(v) for k, v in inputs.items()}
    truth = double(**inputs)[0][real]
    eager = theirs.to(DEVICE)(**given)[0].cpu()[real]
    got = fused.to(DEVICE)(**given)[0].cpu()[real]
    require([contract.judge("out", got, truth, eager, gradient=False)], "sdpa")
