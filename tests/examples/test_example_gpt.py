"""examples/gpt.py and gpt_model.py: training, masks, and generation with and without caches."""

import math

import pytest
import torch
from example_runs import run_example
from torch.testing import assert_close

import fused_attn

# isort: split
import data
import gpt
import gpt_model

VOCABULARY = 50
TIGHT = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return gpt_model.GPT(VOCABULARY)


def draw(*shape):
    return torch.randint(VOCABULARY, shape)


@pytest.mark.thorough
def test_smoke(tmp_path):
    printed, figures = run_example("gpt", tmp_path)
    assert figures["same_with_and_without_cache"] is True
    assert figures["curves"]["holds"]
    assert 3 < figures["unigram_loss"] < 3.7
    assert figures["bits_per_character"] == pytest.approx(
        figures["validation_loss"] / math.log(2), abs=1e-3
    )
    assert figures["perplexity"] == pytest.approx(math.exp(figures["validation_loss"]), rel=1e-3)
    assert figures["sample"].startswith(gpt.PROMPT)
    assert all(v["with_cache"] > 0 for v in figures["tokens_per_second"].values())
    assert figures["sample"] in printed
    for name in ("losses", "speed"):
        assert (tmp_path / f"gpt_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_rotation_depends_on_relative_positions_only():
    query, key = torch.randn(2, 1, 2, 1, gpt_model.HEAD_DIM).double()

    def score(i, j):
        first, second = (
            fused_attn.rotary_embedding(x, *gpt_model.rotation(torch.tensor([at])))
            for x, at in ((query, i), (key, j))
        )
        return (first * second).sum(-1)

    assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=0)
    assert_close(score(0, 0), (query * key).sum(-1))
    assert not torch.allclose(score(7, 3), score(7, 4), atol=1e-2)


def test_logits_do_not_depend_on_later_tokens(model):
    tokens = draw(2, 100)
    changed = tokens.clone()
    changed[:, 60] = (tokens[:, 60] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert_close(before[:, :60], after[:, :60], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 60:], after[:, 60:], atol=1e-3)


def test_windowed_layer_attends_to_its_window(model):
    window = gpt_model.WINDOW
    x = torch.randn(1, 3 * window, gpt_model.D_MODEL)
    changed = x.clone()
    changed[:, 10] += 1
    by = gpt_model.rotation(torch.arange(x.shape[1]))
    windowed, full = model.masks
    attention = model.blocks[0].attention
    first, second = (attention(t, by, windowed, None) for t in (x, changed))
    differs = (first != second).any(-1)[0].nonzero()[:, 0]
    assert (differs[0], differs[-1]) == (10, 10 + window - 1)
    first, second = (attention(t, by, full, None) for t in (x, changed))
    assert not torch.allclose(first[:, 10 + window :], second[:, 10 + window :], atol=1e-6)


@pytest.mark.parametrize("parts", [[1] * 150, [100] + [1] * 50, [30, 1, 70, 20, 1, 28]])
def test_logits_with_and_without_caches_are_equal(model, parts):
    tokens = draw(2, 150)
    caches = model.caches()
    with torch.no_grad():
        cached = [model(part, caches) for part in tokens.split(parts, dim=1)]
        assert_close(torch.cat(cached, dim=1), model(tokens), **TIGHT)
    assert [cache.length for cache in caches] == [150] * gpt_model.NUM_LAYERS
    kept, _ = caches[0].kept
    assert kept.shape[2] == gpt_model.WINDOW - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_with_and_without_caches_is_equal(model, temperature):
    prompt, count = draw(2, 5), gpt_model.WINDOW + 16
    first, second, again = (
        gpt_model.generate(model, prompt, count, temperature=temperature, seed=1, cached=cached)
        for cached in (True, False, True)
    )
    assert first.shape == (2, 5 + count) and first[:, :5].equal(prompt)
    assert first.equal(second) and first.equal(again)


def test_held_out_works_are_not_in_the_others():
    size, stride = 80, 20
    works = {name: text.lower() for name, text in data.shakespeare().items()}
    held_out = "\n".join(works[name] for name in gpt.HELD_OUT)
    passages = {held_out[i : i + size] for i in range(len(held_out) - size)}
    for name, text in works.items():
        if name not in gpt.HELD_OUT:
            starts = range(0, len(text) - size, stride)
            assert passages.isdisjoint(text[i : i + size] for i in starts), name
