"""examples/rnn.py: hand-written attention, padding, and decoding one token at a time."""

from __future__ import annotations

import json

import pytest
import torch
from example_runs import run_example  # adds examples/ to sys.path

# isort: split
import common
import rnn
import translation
from test_example_translate import WORDS, sentences
from translation import BOS, EOS

from fused_attn import masks
from fused_attn.tools import doctor


@pytest.fixture
def model() -> rnn.Recurrent:
    torch.manual_seed(0)
    return rnn.Recurrent(WORDS, embed_dim=8, hidden=16).eval()


@pytest.mark.thorough
def test_smoke(tmp_path):
    out, figures = run_example("rnn", tmp_path)  # in a folder without results of translate.py
    assert "run `python examples/translate.py` first" in out
    assert figures["curves"]["holds"]
    assert 0 <= figures["train"]["all"]["exact"] <= 1
    for name in ("backends", "loss", "lengths"):
        assert (tmp_path / f"rnn_{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_only_the_transformer_of_a_run_like_this_one_is_compared(tmp_path):
    run = common.Example("rnn", smoke=True, seed=3, output=tmp_path, backend="cpp")
    run.figures["settings"] = "5 pairs"
    assert rnn.transformer(run) is None
    alike = {"seed": 3, "backend": "cpp", "machine": doctor.machine()}
    others = ({}, {"seed": 4}, {"backend": "eager"}, {"machine": {}}, {"figures": {}})
    for other in others:
        found = {**alike, "figures": {"settings": "5 pairs"}, **other}
        (tmp_path / "translate.json").write_text(json.dumps(found), "utf-8")
        assert rnn.transformer(run) == (None if other else found["figures"]), other


def test_attention_by_hand():
    torch.manual_seed(0)
    states, memory = torch.randn(2, 4, 16), torch.randn(2, 5, 16)
    out = rnn.attend(states, memory, masks.padding([5, 3]))
    for n, length in enumerate((5, 3)):
        keys = memory[n, :length]
        torch.testing.assert_close(out[n], (states[n] @ keys.T).softmax(-1) @ keys)


@torch.no_grad()
def test_padding_reaches_no_logits(model):
    source, target = sentences(9, 4), sentences(8, 5)
    logits = model(source, target)
    for n, (s, t) in enumerate(((9, 8), (4, 5))):
        alone = model(source[n : n + 1, :s], target[n : n + 1, :t])
        torch.testing.assert_close(logits[n, :t], alone[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_future_reaches_no_logits(model):
    source, target = sentences(6, 6), sentences(8, 8)
    logits = model(source, target)
    target[:, 5:] = sentences(3, 3)
    changed = model(source, target)
    torch.testing.assert_close(changed[:, :5], logits[:, :5])
    assert not torch.allclose(changed[:, 5:], logits[:, 5:])


@torch.no_grad()
def test_steps_are_teacher_forcing(model):
    source, target = sentences(7, 3), sentences(6, 6)
    memory, state, mask = model.encode(source)
    steps = []
    for t in range(6):
        logits, state = model.decode(target[:, t : t + 1], state, memory, mask)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target))


@torch.no_grad()
def test_search_is_greedy(model):
    """Up to <eos>, each token that search returns is the argmax of its teacher-forced logits.

    All later tokens are <eos>.
    """
    source = sentences(7, 3)
    said = model.search(source)
    assert said.shape[1] <= 7 + translation.LONGER_BY
    read = torch.cat([torch.full((2, 1), BOS), said[:, :-1]], dim=1)
    best = model(source, read).argmax(-1)
    open_ = ((said == EOS).cumsum(1) - (said == EOS).long()) == 0
    assert torch.equal(best[open_], said[open_]) and open_.sum() > 2
    assert (said[~open_] == EOS).all()
