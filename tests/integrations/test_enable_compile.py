"""fused_attn.enable() under torch.compile (full graphs and caches) and under torch.export."""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import Called, assert_equal_in_float64, perturb, randn, random_mask, run

import fused_attn
from fused_attn.backends import get_backend

BATCH, LEN, EMBED, HEADS = 2, 5, 24, 3
CPP = get_backend("cpp")


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    fused_attn.disable()


@contextlib.contextmanager
def kernel_calls():
    """Yield a function that returns the numbers of forward and backward kernel calls."""
    with (
        mock.patch.object(CPP, "attention_fwd", wraps=CPP.attention_fwd) as forward,
        mock.patch.object(CPP, "attention_bwd", wraps=CPP.attention_bwd) as backward,
    ):
        yield lambda: (forward.call_count, backward.call_count)


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def attend(query, mask=None, dropout_p=0.0):
    return F.scaled_dot_product_attention(query, query, query, mask, dropout_p)


@pytest.mark.parametrize("kind", [None, "bool", "learned"])
def test_full_graph_with_gradients(kind):
    module = perturb(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True).double())
    mask = None if kind is None else random_mask(kind, LEN, LEN)
    options = {"attn_mask": mask, "need_weights": False}
    x = randn(BATCH, LEN, EMBED)
    expected = run(module, (x, x, x), options)
    fused_attn.enable()
    with kernel_calls() as calls:
        actual = run(compiled(module), (x, x, x), options)
    assert calls() == (1, 1)
    assert_equal_in_float64({k.replace("_orig_mod.", ""): v for k, v in actual.items()}, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode):
    query = torch.randn(BATCH, HEADS, LEN, 8)
    mask = torch.rand(LEN, LEN) < 0.9
    expected = attend(query, mask)
    fused_attn.enable()
    with mode(), kernel_calls() as calls:
        out = compiled(attend)(query, mask)
    assert calls() == (1, 0)
    torch.testing.assert_close(out, expected)


def test_dynamic_shapes():
    fused_attn.enable()
    graph = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    with kernel_calls() as calls:
        for seqlen in (5, 9, 12):
            query = torch.randn(BATCH, HEADS, seqlen, 8)
            torch.testing.assert_close(graph(query), attend(query))
    assert calls()[0] >= 3


def test_dropout_differs_between_calls():
    fused_attn.enable()
    graph = compiled(attend)
    query = torch.randn(BATCH, HEADS, 32, 8, requires_grad=True)
    first, second = graph(query, None, 0.5), graph(query, None, 0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    first = graph(query, None, 0.5)
    torch.manual_seed(1)
    assert torch.equal(first, graph(query, None, 0.5))


def test_autocast_in_the_graph():
    def function(query):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(query)

    fused_attn.enable()
    query = torch.randn(BATCH, HEADS, LEN, 8)
    with kernel_calls() as calls:
        out = compiled(function)(query)
    assert calls() == (1, 0) and out.dtype == torch.bfloat16
    assert torch.equal(out, function(query))


def test_compiled_graphs_do_not_change():
    query = torch.randn(BATCH, HEADS, LEN, 8)
    graph = compiled(attend)
    expected = graph(query)
    with kernel_calls() as calls, fused_attn.enabled():
        assert torch.equal(graph(query), expected)
        assert calls() == (0, 0), "a graph compiled before the block has changed"
        torch.compiler.reset()
        torch.testing.assert_close(graph(query), expected)
        assert calls() == (1, 0)
    with kernel_calls() as calls:
        torch.testing.assert_close(graph(query), expected)
        assert calls() == (1, 0), "a graph compiled within the block has changed"
        torch.compiler.reset()
        assert torch.equal(graph(query), expected)
        assert calls() == (1, 0)


def test_compile_caches(tmp_path, monkeypatch):
    """Compile caches distinguish graphs with and without enable() by a tag in the cache key."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    query = torch.randn(BATCH, HEADS, LEN, 8)
    hits = torch._dynamo.utils.counters["aot_autograd"]
    for on, cached in ((False, False), (True, False), (False, True), (True, True)):
        torch.compiler.reset()
        hits.clear()
        with kernel_calls() as calls, fused_attn.enabled() if on else contextlib.nullcontext():
            compiled(attend, "inductor")(query)
        assert calls() == (int(on), 0)
        assert hits["autograd_cache_hit"] == int(cached)


def test_threads_without_the_tag_compile_the_sdpa_of_torch():
    """If cache_key_tag is thread-local, a thread without enable()'s tag compiles torch's SDPA."""
    query = torch.randn(BATCH, HEADS, LEN, 8)
    fused_attn.enable()
    tags = []

    def compile_there():
        tags.append(torch.compiler.config.cache_key_tag)
        compiled(attend)(query)

    thread = threading.Thread(target=compile_there)
    with kernel_calls() as calls:
        thread.start()
        thread.join()
    assert calls() == ((0, 0) if tags == [""] else (1, 0))


@pytest.mark.parametrize("strict", [False, True])
def test_export_contains_the_op_of_torch(strict):
    query, mask = torch.randn(BATCH, HEADS, LEN, 8), torch.rand(LEN, LEN) < 0.9
    expected = attend(query, mask)
    with fused_attn.enabled():
        program = torch.export.export(Called(attend), (query, mask), strict=strict)
        decomposed = program.run_decompositions()
    operations = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert operations == [torch.ops.aten.scaled_dot_product_attention.default]
    assert torch.equal(program.module()(query, mask), expected)
    for exported in (program, decomposed):  # torch 2.9 decomposes the op
        module = exported.module()
        torch.testing.assert_close(module(query, mask), expected)
        with fused_attn.enabled():
            torch.testing.assert_close(module(query, mask), expected)


@pytest.mark.parametrize("mask", [None, torch.ones(LEN, LEN).tril(-1).bool()])
@pytest.mark.parametrize("gradients", [True, False])
def test_frames_that_dynamo_runs_eagerly(mask, gradients):
    """A call in a frame that Dynamo cannot compile, as after a graph break in a loop, is fused."""

    def attend_twice(query):
        for _ in range(2):
            torch._dynamo.graph_break()
            query = F.scaled_dot_product_attention(query, query, query, mask)
        return query

    x = randn(BATCH, HEADS, LEN, 8).requires_grad_(gradients)
    function = torch.compile(attend_twice, backend="aot_eager")
    with torch.set_grad_enabled(gradients), kernel_calls() as calls:
        counts = fused_attn.enable()
        out = function(x)
        torch.compiler.reset()
        function(x)
        assert "4 calls fused, 0 left to torch" in str(counts)
        if gradients:
            out.sum().backward()
        assert calls() == (4, 2 * gradients)
        torch.testing.assert_close(out, attend_twice(x))
