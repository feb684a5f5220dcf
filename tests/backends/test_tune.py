"""The Triton tuner with fake timings: candidates, overrides, choice and printed rows."""

from unittest import mock

import pytest
import torch
from helpers import INTERPRETED

pytest.importorskip("triton")

import tune_triton as tune

from fused_attn.backends.triton import attention, tuning
from fused_attn.backends.triton.tuning import Config

ARCH, SHARED_MEMORY = "sm_90", 227 << 10
OLD, NEW = Config(64, 64, 4, 2), Config(128, 64, 8, 3)


@pytest.fixture
def tables(monkeypatch):
    tables = {ARCH: {("fwd", 2): {128: OLD}}}
    monkeypatch.setattr(tuning, "TABLES", tables, raising=False)
    monkeypatch.setattr(
        tuning, "config", lambda kind, arch, size, head_dim: tables[arch][kind, size][head_dim]
    )
    return tables


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("kind", tune.PASSES)
def test_candidates_fit(kind, head_dim, element_size):
    tried = tune.candidates(kind, element_size, head_dim, SHARED_MEMORY)
    assert tried and len(tried) == len(set(tried)) <= 30
    for config in tried:
        assert tune.shared_bytes(kind, config, element_size, head_dim) <= SHARED_MEMORY
    assert not tune.candidates(kind, element_size, head_dim, 1 << 10)


def test_shared_bytes():
    """Estimates of shared memory, in bytes, are within 1 KB of the compiler's for sm_90."""
    for kind, expected in (("fwd", 81920), ("dq", 98304), ("dkdv", 98304)):
        assert tune.shared_bytes(kind, OLD, 2, 128) == expected


def test_override(tables):
    with tune.override("fwd", ARCH, 2, 128, NEW), tune.override("dq", ARCH, 2, 64, NEW):
        assert tables == {ARCH: {("fwd", 2): {128: NEW}, ("dq", 2): {64: NEW}}}
    assert tables == {ARCH: {("fwd", 2): {128: OLD}}}
    with pytest.raises(ValueError, match="sm_75"), tune.override("fwd", "sm_75", 2, 128, NEW):
        pass


def test_the_fastest_correct_candidate_wins(tables, capsys):
    """Candidates with wrong results or failed launches are rejected with a message."""
    wrong, broken = Config(128, 32, 4, 2), Config(128, 128, 4, 2)
    seconds = {OLD: 4.0, NEW: 2.0, wrong: 1.0}

    def config():
        return tables[ARCH]["fwd", 2][128]

    def call():
        if config() == broken:
            raise RuntimeError("out of resource")
        return [torch.ones(4) * (1.5 if config() == wrong else 1.0)]

    tried = [wrong, broken, NEW, OLD]
    found = tune.tune("fwd", ARCH, 2, 128, [call], tried, lambda call: seconds[config()])
    assert found == (NEW, OLD, 2.0)
    messages = capsys.readouterr().err
    assert "results differ" in messages and "out of resource" in messages


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", tune.PASSES)
def test_triton_calls(kind, monkeypatch):
    """The tuner's calls have the same results in two configs."""
    sizes = {"_SEQLEN": 96, "_TOKENS": 96, "_HIDDEN": 32, "_CACHE": 300, "_DECODE_BATCH": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(tune, name, size)
    config = mock.Mock(return_value=Config(16, 64, 4, 2))
    for module in (tuning, attention):
        monkeypatch.setattr(module, "config", config)
    monkeypatch.setattr(tuning, "TABLES", {ARCH: {}}, raising=False)
    calls = tune.calls_of(kind, torch.float32, 16, torch.device("cpu"))
    assert len(calls) == (1 if kind == "decode" else 2)
    wanted = [call() for call in calls]
    config.return_value = Config(16, 32, 4, 2)
    for call, results in zip(calls, wanted, strict=True):
        tune._check(call(), results, 4)
    kinds = {call.args[0].removesuffix("_masked") for call in config.call_args_list}
    assert kind.removesuffix("_masked") in kinds


def test_head_dims_are_rounded_up():
    widths = [tuning.width_of(head_dim) for head_dim in (1, 64, 65, 128, 129, 256)]
    assert widths == [64, 64, 128, 128, 256, 256]


def test_printed_rows():
    """A printed row has the new configs of tuned head_dims, and the old configs of all others."""
    found = {("fwd", 2): {64: tune.Found(OLD, OLD, 1.0), 128: tune.Found(NEW, OLD, 1.5)}}
    text = tune.rows("sm_90", "NVIDIA H200", found)
    assert "# NVIDIA H200: 64 1.00x, 128 1.50x as fast as the row before" in text
    table = eval("{" + text + "}", {"_row": tuning._row})
    rest = tuning.config("fwd", "sm_90", 2, 256)
    assert table == {"sm_90": {("fwd", 2): {64: OLD, 128: NEW, 256: rest}}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would tune")
def test_without_a_gpu():
    with pytest.raises(SystemExit, match="requires a GPU"):
        tune.main([])
