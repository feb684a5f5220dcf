"""`make bench-rivals` times all libraries on the same problems, and reports wrong results."""

import sys
from dataclasses import replace

import pytest
import torch
from commands import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import rival_attention
import rivals

from fused_attn.tools.cases import Shape


class Untimed:
    """Meter that returns fixed times without running the calls."""

    class module:  # noqa: N801
        @staticmethod
        def product_peak(dtype, threads):
            return 1e9

    @staticmethod
    def medians(ways):
        return {name: 1.0 + i for i, name in enumerate(ways)}


def small(shape):
    size = shape.size
    heads = 4 // (size.num_heads // size.num_heads_kv)
    seqlen_k = min(size.seqlen_k, 300)
    return replace(shape, size=Shape(2, 4, heads, min(size.seqlen_q, 300), seqlen_k, 32))


@pytest.mark.parametrize("shape", rivals.PROBLEMS, ids=lambda shape: shape.name)
def test_installed_libraries_agree(shape):
    pytest.importorskip("onnxruntime", reason="reason: onnxruntime is not installed")
    record = rivals.measure(small(shape), torch.float32, Untimed())
    assert not {"fused_attn", "torch"} & {*record["failed"]}
    reason = record["failed"].get("onnxruntime", "no operator for this mask and these heads")
    assert reason == "no operator for this mask and these heads"


def test_wrong_results_are_not_timed(monkeypatch):
    def wrong(shape, operands):
        call = rival_attention.sdpa(shape, operands)
        return replace(call, out=lambda result: result + 0.01)

    libraries = {"fused_attn": rival_attention.fused, "torch": rival_attention.sdpa}
    others = {"zentorch": wrong, "vllm": rival_attention.sdpa}
    monkeypatch.setattr(rival_attention, "LIBRARIES", libraries | others)
    record = rivals.measure(small(rivals.PROBLEMS[0]), torch.float32, Untimed())
    assert record["failed"] == {"zentorch": "wrong by 0.01"}
    assert record["seconds"] == {"fused_attn": 1.0, "torch": 2.0, "vllm": 3.0}


def test_tables():
    pytest.importorskip("matplotlib", reason="reason: matplotlib is not installed")
    import rival_tables

    attention = {
        "name": "L128", "dtype": "float32", "threads": 2, "share_of_peak": 0.5,
        "seconds": {"fused_attn": 0.002, "torch": 0.003, "vllm": 0.001},
    }  # fmt: skip
    model = {
        "model": "BERT", "name": "1 sentence", "seconds": {"fused_attn": 0.01, "torch": 0.02},
        "cosines": {"fused_attn": 1.0, "torch": 0.8},
    }  # fmt: skip
    machine = {"cpu": "Some CPU", "isa": "avx2", "torch": "2.13.0"}
    results = {"machine": machine, "attention": [attention], "models": [model]}
    text = rival_tables.markdown(results, "plot.svg")
    assert "| L128 | float32 | 2 | 50% | 1.50 | - | - | - | 0.50 |" in text
    assert "| 1 sentence | 10 | 2.00 (cosine 0.80) |" in text
    assert rival_tables.fastest(attention) == 0.5
