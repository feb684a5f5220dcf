"""The GPU benchmarks at toy sizes on CPU tensors, so that none fails on its first GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_shapes
import gpu_table
import gpu_ways
import test_gpu as benchmarks
from gpu_run import Runner, slug

BF16 = torch.bfloat16
MASKS = list({(shape.mask, shape.dropout_p): shape for shape, _ in gpu_shapes.BACKWARD}.values())
NORMS = list({(shape.kind, shape.residual): shape for shape in gpu_shapes.NORMS}.values())


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """On the CPU; nothing is timed or compiled, which FlexAttention would be even so."""

    def compiled(function):
        return dense_flex if function.__name__ == "flex_attention" else function

    monkeypatch.setattr(gpu_ways, "compiled", compiled)

    def timer(ways):
        for calls in ways.values():
            calls[-1]()
        return dict.fromkeys(ways, 1e-3)

    return Runner(
        torch.device("cpu"), "cpp", {"copy": 1e9, "matmul": 1e12},
        {"gpu": "none", "torch": "", "triton": ""}, path=tmp_path / "gpu.json", timer=timer,
        host_timer=timer, memory=lambda call: 0,
    )  # fmt: skip


def dense_flex(query, key, value, score_mod, block_mask, enable_gqa):
    """What FlexAttention does with these arguments."""
    sizes = (*query.shape[:3], key.shape[2])
    at = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    group = query.shape[1] // key.shape[1]
    assert enable_gqa == (group > 1)
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = (query @ key.transpose(-2, -1)).float() / query.shape[3] ** 0.5
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*at), float("-inf"))
    return scores.softmax(-1).to(value.dtype) @ value


def small(shape, seqlen=96):
    seqlen_q = min(shape.seqlen_q, seqlen)
    return replace(
        shape, batch=2, num_heads=4, num_heads_kv=2 if shape.num_heads_kv else 0,
        seqlen_q=seqlen_q, seqlen_k=seqlen, head_dim=16, span=32,
    )  # fmt: skip


def only_record(runner):
    """What was recorded, which is what was written."""
    (record,) = json.loads(runner.path.read_text())["records"]
    assert record["check"] == "passed" and record["milliseconds"]["fused_attn"] == 1.0
    assert record["name"] in gpu_table.text(runner.results())
    assert record["name"] in gpu_table.markdown(runner.results())
    return record


@pytest.mark.parametrize("group", ["forward", "backward"])
@pytest.mark.parametrize("shape", MASKS, ids=lambda shape: shape.name)
def test_attention(shape, group, runner):
    shape = small(shape)
    benchmarks.attention(runner, group, shape, BF16, work=runner.work(shape, group == "backward"))
    record = only_record(runner)
    peers = {"sdpa"} if shape.dropout_p else {"sdpa", "flex"}
    assert record["speedup"].keys() >= peers, record["not_available"]
    assert ("share_of_unmasked" in record) == (shape.mask != "none")


@pytest.mark.parametrize("shape", [gpu_shapes.DECODE[0], gpu_shapes.SMALL], ids=lambda s: s.name)
def test_other_attention(shape, runner):
    function = benchmarks.test_decode if shape.seqlen_q == 1 else benchmarks.test_call
    function(small(shape, 200 if shape.seqlen_q == 1 else 32), runner)
    assert only_record(runner)["speedup"].keys() >= {"sdpa", "flex"}


@pytest.mark.parametrize("group", ["packed forward", "packed backward"])
def test_packed(group, runner):
    benchmarks.test_packed(small(gpu_shapes.PACKED[0]), group, runner)
    record = only_record(runner)
    assert record["speedup"].keys() >= {"nested"}, record["not_available"]


@pytest.mark.parametrize("group", ["norm forward", "norm backward"])
@pytest.mark.parametrize("shape", NORMS, ids=lambda shape: shape.name)
def test_norm(shape, group, runner):
    benchmarks.test_norm(replace(shape, rows=40, columns=64), group, runner)
    record = only_record(runner)
    assert record["speedup"].keys() >= {"torch", "compiled"}, record["not_available"]


def test_a_wrong_result_is_not_timed(runner, monkeypatch):
    shape, right = small(gpu_shapes.MASKED[0]), gpu_ways.attention

    def wrong(shape, backend, device):
        call = right(shape, backend, device)
        return call if backend == "eager" else lambda *operands: 1.1 * call(*operands)

    monkeypatch.setattr(gpu_ways, "attention", wrong)
    with pytest.raises(AssertionError, match="wrong"):
        benchmarks.attention(runner, "forward", shape, BF16, work=runner.work(shape, False))
    (record,) = runner.records
    assert record["check"].startswith("FAILED") and "speedup" not in record
    assert "FAILED" in gpu_table.text(runner.results())


def test_a_peer_that_computes_something_else_is_left_out(runner, monkeypatch):
    shape = small(gpu_shapes.MASKED[0])
    monkeypatch.setattr(gpu_ways, "_flex_mask", lambda shape, device: lambda b, h, i, j: i > j + 5)
    benchmarks.attention(runner, "forward", shape, BF16, work=runner.work(shape, False))
    assert "something else" in only_record(runner)["not_available"]["flex"]


def test_visible_shares():
    shape = replace(gpu_shapes.MASKED[0], seqlen_q=256, seqlen_k=256)
    assert gpu_shapes.visible_pairs(shape, "cpu") == pytest.approx(257 / 512)
    assert gpu_shapes.visible_tiles(shape, "cpu") == pytest.approx(6 / 8)


def test_slug():
    assert slug("NVIDIA H200") == "nvidia-h200"
