"""examples/rnn.py: hand-written attention, padding, and decoding one token at a time."""

import json

import pytest
import torch
from example_runs import run_example  # adds examples/ to sys.path

# isort: split
import common
import rnn
import translation
from test_example_translate import after_end, new_model, sentences
from translation import BOS, EOS

from fused_attn import masks
from fused_attn.tools import doctor


@pytest.fixture
def model() -> rnn.Recurrent:
    return new_model("rnn")


@pytest.mark.thorough
def test_smoke(tmp_path):
    out, figures = run_example("rnn", tmp_path)  # in a folder without results of translate.py
    assert "run `python examples/translate.py` first" in out
    assert figures["curves"]["holds"]
    assert 0 <= figures["train"]["all"]["exact"] <= 1
    for name in ("backends", "loss", "lengths"):
        assert (tmp_path / f"rnn_{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_only_a_transformer_with_equal_settings_is_compared(tmp_path):
    run = common.Example("rnn", smoke=True, seed=3, output=tmp_path, backend="cpp")
    run.figures["settings"] = "5 pairs"
    assert rnn.transformer(run) is None
    equal = {"seed": 3, "backend": "cpp", "machine": doctor.machine()}
    equal["figures"] = {"settings": "5 pairs"}
    for other in ({}, {"seed": 4}, {"backend": "eager"}, {"machine": {}}, {"figures": {}}):
        found = equal | other
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
def test_single_steps_equal_one_call(model):
    source, target = sentences(7, 3), sentences(6, 6)
    memory, state, mask = model.encode(source)
    steps = []
    for t in range(6):
        logits, state = model.decode(target[:, t : t + 1], state, memory, mask)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target))


@torch.no_grad()
def test_search_is_greedy(model):
    """Each token that search returns has the largest logit; <eos> is followed only by <eos>."""
    source = sentences(7, 3)
    found = model.search(source)
    assert found.shape[1] <= 7 + translation.LONGER_BY
    read = torch.nn.functional.pad(found[:, :-1], (1, 0), value=BOS)
    best, after = model(source, read).argmax(-1), after_end(found)
    assert torch.equal(best[~after], found[~after]) and (~after).sum() > 2
    assert (found[after] == EOS).all()
