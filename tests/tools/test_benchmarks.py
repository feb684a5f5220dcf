"""The benchmarks for GPUs and CPUs, at small sizes on the CPU."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from commands import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import shapes
import tables
import test_attention_speed as benchmarks
import test_norm_speed as norm_benchmarks
import ways
from runner import Runner, slug
from shapes import BF16

from fused_attn.tools.cases import Shape


def first_of_each(kind, problems):
    """Return the first GPU problem of each kind, where kind(shape) identifies the kind."""
    return list({kind(shape): shape for shape, *_ in reversed(problems["gpu"])}.values())


ATTENTION = first_of_each(lambda s: (s.mask, s.bias, s.dropout_p), shapes.BACKWARD)
NORMS = first_of_each(lambda s: (s.kind, s.residual), shapes.NORMS)
PACKED, CALL, DECODE = (p["gpu"][0][0] for p in (shapes.PACKED, shapes.CALL, shapes.DECODE))


class Untimed:
    """Meter that runs only the last call of each list, and reports fixed times."""

    def peak(self, dtype):
        return "matmul"

    def seconds(self, ways):
        for calls in ways.values():
            calls[-1]()
        return dict.fromkeys(ways, 1e-3)

    host_seconds = seconds

    def memory(self, call):
        return 0


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """Return a runner that runs GPU benchmarks on the CPU, without compilation."""

    def compiled(function):
        return dense_flex if function.__name__ == "flex_attention" else function

    monkeypatch.setattr(ways, "compiled", compiled)
    return Runner(
        Untimed(), torch.device("cpu"), "cpp", {"copy": 1e9, "matmul": 1e12},
        {"gpu": "none", "torch": "", "triton": ""}, gpu=True, path=tmp_path / "gpu.json",
    )  # fmt: skip


def dense_flex(query, key, value, score_mod, block_mask, enable_gqa):
    """Compute FlexAttention with dense operations."""
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
    heads_kv = 4 if shape.size.num_heads == shape.size.num_heads_kv else 2
    size = Shape(2, 4, heads_kv, min(shape.size.seqlen_q, seqlen), seqlen, 16)
    return replace(shape, size=size, mask=re.sub(r":\d+", ":32", shape.mask))


def only_record(runner):
    """Return the only record of the results file, whose check must have passed."""
    (record,) = json.loads(runner.path.read_text())["records"]
    assert record["check"] == "passed" and record["milliseconds"]["fused_attn"] == 1.0
    assert record["name"] in tables.gpu_text(runner.results())
    return record


@pytest.mark.parametrize("group", ["forward", "backward"])
@pytest.mark.parametrize("shape", ATTENTION, ids=lambda shape: shape.name)
def test_attention(shape, group, runner):
    shape = small(shape)
    benchmarks.attention(runner, group, shape, BF16, group, work=runner.work(shape, group))
    record = only_record(runner)
    peers = {"sdpa"} if shape.dropout_p else {"sdpa", "flex"}
    assert record["speedup"].keys() >= peers, record["not_available"]
    assert ("share_of_unmasked" in record) == shape.masked


@pytest.mark.parametrize(
    ("run", "shape", "seqlen"),
    [(benchmarks.test_decode, DECODE, 200), (benchmarks.test_call, CALL, 32)],
    ids=["decode", "call"],
)
def test_other_attention(run, shape, seqlen, runner):
    run(small(shape, seqlen), BF16, runner)
    assert only_record(runner)["speedup"].keys() >= {"sdpa", "flex"}


@pytest.mark.parametrize("group", ["packed forward", "packed backward"])
def test_packed(group, runner):
    benchmarks.test_packed(small(PACKED), BF16, group, runner)
    record = only_record(runner)
    assert "nested" in record["speedup"], record["not_available"]


@pytest.mark.parametrize("group", ["norm forward", "norm backward"])
@pytest.mark.parametrize("shape", NORMS, ids=lambda shape: shape.name)
def test_norm(shape, group, runner):
    norm_benchmarks.test_norm(replace(shape, rows=40, columns=64), BF16, group, runner)
    record = only_record(runner)
    assert record["speedup"].keys() >= {"torch", "compiled"}, record["not_available"]


CPU_ATTENTION = [
    (group, shape)
    for group, problems in (("backward", shapes.BACKWARD), ("training", shapes.TRAINING))
    for shape, dtype in problems["cpu"]
    if dtype == BF16 and shape.layout == "transposed"
    if shape.masked or shape.softcap or shape.dropout_p
]


@pytest.mark.parametrize(("group", "shape"), CPU_ATTENTION, ids=lambda v: getattr(v, "name", v))
def test_attention_on_a_cpu(group, shape, runner):
    runner.gpu, runner.backend = False, None
    passes = "both" if group == "training" else group
    benchmarks.attention(runner, group, small(shape), BF16, passes, work={})
    assert not runner.records[0]["not_available"]
    assert runner.records[0]["speedup"].keys() == {"sdpa", "eager"}
    assert runner.records[0]["layout"] == "transposed"


def test_both_layouts_have_the_same_operands():
    first, second = (shape for shape, dtype in shapes.FORWARD["cpu"][::3][:2])
    assert (first.name, first.quick) == (second.name, True) and not second.quick
    for tensor, other in zip(first.operands(BF16), second.operands(BF16), strict=True):
        assert torch.equal(tensor, other) and other.is_contiguous()
        assert tensor.transpose(1, 2).is_contiguous() and not tensor.is_contiguous()


def test_tables_of_both_layouts():
    forward = {"group": "forward", "name": "long", "dtype": "float32"}
    norm = {"group": "norm forward", "name": "bert", "dtype": "float32"}
    contiguous, transposed = forward | {"layout": "contiguous"}, forward | {"layout": "transposed"}
    layouts = tables.by_layout({"records": [contiguous, transposed, norm]})
    assert [*layouts.items()] == [("transposed", [transposed, norm]), ("contiguous", [contiguous])]
    assert tables.by_layout({"records": [forward, norm]}) == {"contiguous": [forward, norm]}


def test_packed_on_a_cpu(runner):
    runner.gpu, runner.backend = False, None
    benchmarks.test_packed(small(shapes.PACKED["cpu"][0][0]), BF16, "packed", runner)
    assert runner.records[0]["speedup"].keys() == {"sdpa"}


def test_a_wrong_result_is_not_timed(runner, monkeypatch):
    shape, right = small(shapes.GPU_MASKED[0]), ways.attention

    def wrong(shape, backend, device):
        call = right(shape, backend, device)
        return call if backend == "eager" else lambda *operands: 1.1 * call(*operands)

    monkeypatch.setattr(ways, "attention", wrong)
    with pytest.raises(AssertionError, match="wrong"):
        benchmarks.attention(runner, "forward", shape, BF16, work=runner.work(shape, "forward"))
    (record,) = runner.records
    assert record["check"].startswith("FAILED") and "speedup" not in record
    assert "FAILED" in tables.gpu_text(runner.results())


def test_a_peer_with_another_result_is_omitted(runner, monkeypatch):
    shape = small(shapes.GPU_MASKED[0])
    monkeypatch.setattr(ways, "_flex_mask", lambda mask: lambda b, h, i, j: i > j + 5)
    benchmarks.attention(runner, "forward", shape, BF16, work=runner.work(shape, "forward"))
    assert "something else" in only_record(runner)["not_available"]["flex"]


def test_visible_shares():
    shape = replace(shapes.GPU_MASKED[0], size=Shape.parse("4,16,256,256,128"))
    assert shape.visible_pairs() == pytest.approx(257 / 512)
    assert shape.visible_tiles() == pytest.approx(6 / 8)


def test_slug():
    assert slug("NVIDIA H200") == "nvidia-h200"
