"""scripts/fuzz.py: its corpus, random cases, and planted mistakes that it finds and shrinks."""

import argparse
import json
import shlex

import fuzz
import hypothesis
import pytest
import torch
from fuzz_ops import OPS
from helpers import BACKENDS, SLOW_BACKENDS

from fused_attn.backends import get_backend

CORPUS = [json.loads(line) for line in fuzz.CORPUS.read_text().splitlines()]
CASES = 8  # number of cases on slow backends


def sample(backend, count, isa=None):
    """Assert that `count` random cases are within the contract."""
    strategy = fuzz.cases_of(list(OPS), backend, fuzz.DTYPES)
    _, failure = fuzz.search(strategy, backend, 0, count, [isa])
    assert failure is None, failure


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CORPUS, ids=range(len(CORPUS)))
def test_corpus(case, backend):
    """Cases that failed in the past are within the contract."""
    if not fuzz.supports(case, backend):
        pytest.skip(f"reason: {backend} does not compute {case['op']} in {case['dtype']}")
    fuzz.check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sample(backend):
    sample(backend, CASES if backend in SLOW_BACKENDS else 30)


def test_isas(isa):
    sample("cpp", 30)
    for case in CORPUS:
        fuzz.check(case, "cpp")


def plant(monkeypatch, name, mistake):
    """Make a pass of backend "cpp" return mistake(call, outputs)."""
    backend = type(get_backend("cpp"))
    right = getattr(backend, name)
    monkeypatch.setattr(
        backend, name, lambda self, call, *rest: mistake(call, right(self, call, *rest))
    )


MISTAKES = {
    "17 keys": lambda call, out: out * (1.0 + 0.1 * (call.key.shape[2] >= 17)),
    "empty rows": lambda call, out: torch.where((out == 0).all(-1, keepdim=True), 1e-3, out),
    "unused rows": lambda call, out: out + 0.0 * call.value[..., -1:, :1].sum(),
}


@pytest.mark.parametrize(
    ("name", "op"), [*((name, "attention") for name in MISTAKES), ("17 keys", "decode")]
)
def test_planted_mistakes_are_found(name, op, monkeypatch):
    def mistake(call, outputs):
        return outputs._replace(out=MISTAKES[name](call, outputs.out))

    plant(monkeypatch, "attention_fwd", mistake)
    monkeypatch.setattr(fuzz, "PHASES", [hypothesis.Phase.generate])
    _, failure = fuzz.search(fuzz.cases_of([op], "cpp", ["float32"]), "cpp", 0, 100)
    assert failure is not None


def test_failures_are_shrunk_and_reported(monkeypatch, tmp_path, capsys):
    """The printed command contains the smallest failing case, which is added to the corpus once."""

    def mistake(call, outputs):
        return outputs._replace(out=outputs.out + (call.input.shape[-1] >= 100))

    plant(monkeypatch, "norm_fwd", mistake)
    strategy = fuzz.cases_of(["norm"], "cpp", ["float32"])
    _, (case, error) = fuzz.search(strategy, "cpp", 0, 100)
    assert case["shape"] == [1, 100] and case["seed"] == 0 and case["kind"] == "layer_norm"
    assert not any(case[n] for n in ("affine", "residual", "dropout_p", "grads"))
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path / "corpus.txt")
    for _ in range(2):
        fuzz.report(case, error, argparse.Namespace(backend="cpp", isa=["avx2"]))
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:6] == ["python", "scripts/fuzz.py", "--backend", "cpp", "--isa", "avx2"]
    assert json.loads(command[-1]) == json.loads(fuzz.CORPUS.read_text()) == case
