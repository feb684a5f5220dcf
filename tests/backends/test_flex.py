"""Backend "flex": its mask and score functions, results, and refused calls.

The results come from FlexAttention's eager higher-order op, which has gradients on the CPU, and
from its compiled CPU kernel. tests/backends/test_flex_kernels.py runs its Triton kernels.
"""

import math
import random
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from helpers import assert_like_eager, attention, deterministic, random_qkv
from mask_cases import MASKS
from mask_draws import OTHERS, STRUCTURED, drawn_mask, packed_problem, visible_of
from torch._dynamo.exc import TorchDynamoException
from torch.nn.attention.flex_attention import create_mask

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import AttentionProblem, flex, get_backend, problem_of, registry, verdicts
from fused_attn.backends.flex import compiled, variant_of
from fused_attn.backends.flex import operands as operands_file
from fused_attn.backends.flex.functions import attend, mask_function, score_function
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of, spec_of_mask

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(get_backend("flex").unavailable()), reason="reason: needs a newer torch"
)


def problem(number):
    """Return a random call, with structured or dense masks, a bias, ALiBi or packed sequences."""
    draw = random.Random(number)
    heads_kv = draw.choice([1, 2])
    if number % 4 == 3:
        spec, shape, _ = packed_problem(number)
    else:
        heads = heads_kv * draw.choice([1, 2])
        shape = (draw.choice([1, 2, 3]), heads, draw.randint(1, 70), draw.randint(1, 70))
        mask = drawn_mask(number, (*STRUCTURED, *OTHERS), shape)
        generator = torch.Generator().manual_seed(number)
        if draw.random() < 0.3:
            slopes = torch.rand(*draw.choice([(), (shape[0],)]), heads, generator=generator)
            mask = mask & masks.alibi(slopes, draw.choice(["top_left", "bottom_right"]))
        if draw.random() < 0.4:
            sizes = [draw.choice([1, size]) for size in shape]
            mask = mask & masks.bias(torch.randn(*sizes, generator=generator))
        spec = spec_of_mask(mask, *shape, CPU)
    batch, heads, seqlen_q, seqlen_k = shape
    query = torch.randn(batch, heads, seqlen_q, 16)
    key, value = torch.randn(2, batch, heads_kv, seqlen_k, 16)
    return AttentionCall(query, key, value, spec, AttentionOptions(0.25, draw.choice([0.0, 4.0])))


def at_each_position(function, shape):
    """Return a tensor of a function's values at all positions (batch, head, query, key)."""
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=tuple(0 if d == dim else None for d in range(4)))
    return function(*(torch.arange(n) for n in shape))


@pytest.mark.sampled("covered by the first 400 masks", start=[400, 600, 800])
@pytest.mark.parametrize("start", range(0, 1000, 200))
def test_masks_position_by_position(start):
    """mask_mod and score_mod of 1,000 masks match the dense mask and bias at each position."""
    for number in range(start, start + 200):
        call = problem(number)
        variant, operands = variant_of(call, False)
        shape, cap = (*call.query.shape[:3], call.key.shape[2]), call.options.softcap
        want = torch.full(shape, cap * math.tanh(0.7 / cap) if cap > 0.0 else 0.7)
        score_mod, got = score_function(variant, operands), torch.full(shape, 0.7)
        if score_mod is not None:
            mod = lambda *place, own=score_mod: own(torch.tensor(0.7), *place)  # noqa: E731
            got = at_each_position(mod, shape)
        if call.mask.cu_seqlens_q is None:
            _, bias = materialize(call.mask, *shape, CPU, torch.float32)
            want = want if bias is None else want + bias
            torch.testing.assert_close(got, want)
            visible = visible_of(call.mask, shape)
        else:
            visible = packed_problem(number)[2]
        visible_here = got > float("-inf")
        if operands.lists is not None:
            mask_mod = mask_function(variant.pattern, operands)
            visible_here = visible_here & create_mask(mask_mod, *shape, device="cpu")
        assert torch.equal(visible_here, visible), number


@pytest.fixture
def by_eager_op(monkeypatch):
    """Run FlexAttention's eager op, which has gradients on the CPU, instead of Inductor's code."""

    def without_inductor(variant):
        torch._dynamo.reset()
        return torch.compile(
            lambda *a: attend(variant, *a), backend="eager", fullgraph=True, dynamic=False
        )

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex.FlexBackend, "unsupported", lambda self, problem: [])
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_compiled", without_inductor)


@pytest.mark.usefixtures("by_eager_op")
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name):
    """For every mask, out, lse and their gradients are within the numerics contract."""
    shape = 2, 4, 2, 45, 53, 16
    mask = MASKS[name](*shape[:2], *shape[3:5])
    function = attention(mask, enable_gqa=True)
    assert_like_eager(function, random_qkv(*shape, head_dim_v=24), torch.float32, "flex")


BIASES = [(1, 4, 45, 53), (2, 1, 1, 53), (45, 1), (1, 1, 1, 1)]


@pytest.mark.usefixtures("by_eager_op")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *((sizes, torch.float32) for sizes in BIASES),
        # The eager op sums gradients of other shapes in 16 bits; the Triton kernel does not.
        *((sizes, dtype) for sizes in BIASES[:2] for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_learned_bias(sizes, dtype):
    """Gradients of broadcast biases are within the numerics contract, with softcap and a mask."""
    shape = 2, 4, 2, 45, 53, 16
    mask = masks.causal("bottom_right") & masks.padding([53, 20])
    function = attention(mask, enable_gqa=True, softcap=3.0, scale=0.4)
    tensors = {**random_qkv(*shape), "bias": torch.randn(sizes)}
    assert_like_eager(function, tensors, dtype, "flex")


@pytest.mark.usefixtures("by_eager_op")
def test_packed_sequences():
    """Results of packed sequences with a bias and ALiBi are within the numerics contract."""
    lengths = torch.tensor([20, 0, 33, 7])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    mask = masks.causal() & masks.alibi(torch.rand(4, 4, generator=torch.Generator()))

    def function(backend):
        def call(query, key, value, bias):
            return fused_attn.varlen_attention(
                *(t[0].transpose(0, 1) for t in (query, key, value)),
                starts, starts, 33, 33, mask & masks.bias(bias), return_lse=True, backend=backend,
            )  # fmt: skip

        return call

    tensors = {**random_qkv(1, 4, 2, 60, 60, 16), "bias": torch.randn(4, 1, 33, 33)}
    assert_like_eager(function, tensors, torch.float32, "flex")


COMPILED = {
    "window_padding": lambda: masks.sliding_window(40, 9) & masks.padding([260, 100], [300, 250]),
    "documents_shuffled": lambda: masks.documents(torch.arange(300) % 3, torch.arange(260) % 4),
    "dense_bias": lambda: (
        masks.dense(torch.rand(2, 1, 300, 260) < 0.5) & masks.bias(torch.randn(2, 1, 1, 260))
    ),
}


@pytest.mark.sampled("covered by documents_shuffled", name=["window_padding", "dense_bias"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_forward(name, monkeypatch):
    """Inductor's CPU kernel matches the reference, and skips blocks that the mask does not list.

    A second mask of the same kind reuses the compiled variant.
    """
    query, key, value = random_qkv(2, 4, 2, 300, 260, 32).values()
    if name == "window_padding":  # NaN in padding must not affect any result
        key[1, :, 100:] = value[1, :, 100:] = float("nan")

    def call(mask, backend):
        return F.scaled_dot_product_attention(
            query, key, value, mask, backend=backend, enable_gqa=True, softcap=20.0
        )

    mask, lists = COMPILED[name](), operands_file.block_lists
    torch.testing.assert_close(call(mask, "flex"), call(mask, "eager"), rtol=2e-5, atol=2e-5)
    number = len(compiled._functions)

    def without_blocks(intervals, block_size):
        made = lists(intervals, block_size)
        return made._replace(
            kv_num_blocks=made.kv_num_blocks * 0, full_kv_num_blocks=made.full_kv_num_blocks * 0
        )

    monkeypatch.setattr(operands_file, "block_lists", without_blocks)
    assert not call(COMPILED[name](), "flex").any()
    assert len(compiled._functions) == number


def test_compilations_are_bounded(monkeypatch):
    """For 20 shapes, there are at most two variants a mask, and 1.2 compilations a variant."""
    compile_, count = torch.compile, []

    def backend(graph, inputs):
        count.append(graph)
        return lambda *inputs: (torch.empty(()),)

    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile_(f, backend=backend, **kw))
    monkeypatch.setattr(compiled, "_functions", {})
    torch.compiler.reset()
    draw = random.Random(0)
    names = MASKS.keys() - {"intervals", "bits"}  # a call converts them to dense masks
    for _ in range(20):
        shape = (draw.choice([1, 2, 3, 4]), 2, draw.randint(129, 600), draw.randint(129, 600))
        query, key = torch.zeros(*shape[:3], 16), torch.zeros(*shape[:2], shape[3], 16)
        for name in sorted(names):
            spec = spec_of_mask(MASKS[name](*shape), *shape, CPU)
            call = AttentionCall(query, key, key, spec, AttentionOptions(0.25))
            with torch.no_grad():
                variant, operands = variant_of(call, False)
                variant = variant._replace(device_type="cuda")
                assert not compiled.at_limit(variant)
                compiled.run(variant, query, key, key, operands)
    number = len(compiled._functions)
    assert number <= 2 * len(names) <= compiled.MAX_VARIANTS
    assert len(count) <= 1.2 * number
    assert None not in compiled._functions.values()  # no compilation failed


def test_operands_are_cached_by_device():
    """Operands are cached for each device, even if calls on two devices share one MaskSpec."""
    for device in ("cpu", "meta", "cpu"):
        query = torch.empty(1, 2, 40, 16, device=device)
        spec = spec_of(None, True, query, query)
        call = AttentionCall(query, query, query, spec, AttentionOptions(0.25))
        assert variant_of(call, False)[1].begin.device.type == device


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, None),
        ({"mask": "bias", "bias_dtype": torch.float32, "learned_bias": True}, None),
        ({"softcap": True, "result": "lse", "needs_grad": True, "packed": True}, None),
        ({"dropout": True}, "does not support dropout"),
        (
            {"head_dim": 8, "head_dim_v": 8},
            "requires head_dim and head_dim_v of at least 16, not 8",
        ),
        ({"head_dim": 512}, "supports head_dim up to 256, not 512"),
        ({"dtype": torch.float64}, "does not support torch.float64"),
        ({"transformed": True}, "does not support torch.func transforms or forward-mode AD"),
        ({"result": "weights"}, "cannot return attention weights"),
        ({"device": torch.device("mps")}, "runs on cuda, xpu, cpu, not on mps"),
        ({"device": CPU, "needs_grad": True}, "does not support gradients on the CPU"),
        ({"device": CPU, "result": "lse"}, "cannot return lse on the CPU"),
    ],
    ids=str,
)
def test_refusals(properties, reason):
    there = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}
    properties = {**there, "head_dim_v": 64, **properties}
    reasons = get_backend("flex").unsupported(AttentionProblem(**properties))
    assert reasons == ([] if reason is None else [reason])


def test_gradient_of_a_bias_is_refused_if_it_must_be_deterministic():
    learned = AttentionProblem(torch.device("cuda"), torch.float32, 64, 64, learned_bias=True)
    assert not get_backend("flex").unsupported(learned)
    with deterministic():
        assert get_backend("flex").unsupported(learned)


def test_limit_of_compilations(monkeypatch):
    """At the limit on compiled variants, calls that need a new one warn and run on eager."""
    monkeypatch.setattr(compiled, "MAX_VARIANTS", 0)
    monkeypatch.setattr(compiled, "_functions", {})
    tensors = random_qkv(1, 2, 2, 40, 40, 16).values()
    with pytest.warns(UserWarning, match="has reached the limit of 0 compiled kinds of calls"):
        out = F.scaled_dot_product_attention(*tensors, backend="flex")
    assert torch.equal(out, F.scaled_dot_product_attention(*tensors, backend="eager"))
    assert not compiled._functions


def test_verification_has_no_limit(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_VARIANTS", 0)
    variant = variant_of(problem(0), False)[0]
    with verdicts.verifying():
        assert not compiled.at_limit(variant)
    assert compiled.at_limit(variant._replace(scale=0.77))


@pytest.fixture
def failing(monkeypatch):
    """Make compiled functions raise an error when they are called; return a mock of them."""
    function = mock.Mock(side_effect=TorchDynamoException("no such kernel"))
    monkeypatch.setattr(compiled, "_compiled", lambda variant: function)
    monkeypatch.setattr(compiled, "_functions", {})
    return function


def test_failed_compilations(failing):
    """Calls that cannot be compiled warn once and run on eager; compilation is not tried again."""
    tensors = random_qkv(1, 2, 2, 40, 40, 16).values()
    want = F.scaled_dot_product_attention(*tensors, backend="eager")
    with pytest.warns(UserWarning, match="cannot compile this kind of call.*no such kernel"):
        out = F.scaled_dot_product_attention(*tensors, backend="flex")
    assert torch.equal(out, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = F.scaled_dot_product_attention(*tensors, backend="flex")
    assert torch.equal(out, want)
    failing.assert_called_once()


@pytest.mark.usefixtures("failing")
def test_verification_raises_compilation_errors():
    """During verification, a call that cannot be compiled raises instead of running on eager."""
    query = torch.randn(1, 1, 16, 16)
    with verdicts.verifying():
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="cannot compile"):
                F.scaled_dot_product_attention(query, query, query, backend="flex")


def test_without_positions():
    """Calls without queries return an empty output, and calls without keys return zeros."""
    empty, some = torch.empty(2, 2, 0, 16), torch.empty(2, 2, 5, 16)
    out = F.scaled_dot_product_attention(empty, some, some, backend="flex")
    assert out.shape == empty.shape
    assert not F.scaled_dot_product_attention(some, empty, empty, backend="flex").any()


def test_selected_by_name_only():
    """flex is opt-in on an unverified GPU, and a default call on the CPU does not warn."""
    query = torch.randn(1, 2, 40, 16)
    assert "flex" in fused_attn.available_backends()
    there = AttentionProblem(torch.device("cuda"), torch.bfloat16, 64, 64, mask="structured")
    assert get_backend("flex").opt_in_reasons(there)
    assert get_backend("flex").default_for("cuda") == "none"
    assert "compiles a kernel" in get_backend("flex").fallback_warning("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.scaled_dot_product_attention(query, query, query)


def large(**properties):
    """Return a problem with large scores and softcap on a GPU, which torch does not support."""
    sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "softcap": True, "large_scores": True}
    return AttentionProblem(
        torch.device("cuda"), torch.bfloat16, 64, 64, **{**sizes, "mask": "causal", **properties}
    )


def test_default_for_large_scores():
    """Calls that torch does not support run on flex by default if their scores are large."""
    for problem in (large(), large(softcap=False, result="lse", needs_grad=True)):
        assert registry.choose(problem)[0].name == "flex"
        assert registry.choose(replace(problem, large_scores=False))[0].name == "eager"
        assert registry.choose(problem, "eager")[0].name == "eager"
    assert registry.choose(large(dropout=True))[0].name == "eager"
    assert registry.choose(large(softcap=False))[0].name == "sdpa"


@pytest.mark.usefixtures("verdict_folder")
def test_not_the_default_after_a_wrong_verdict():
    wrong = verdicts.ClassVerdict(False, None, verdicts.WRONG)
    classes = dict.fromkeys(verdicts.classes_of(large()), wrong)
    verdicts.store(verdicts.identity("flex", large().device), classes)
    assert registry.choose(large())[0].name == "eager"


def test_large_scores_are_counted():
    """large_scores is True only if torch does not support a call and its scores are large."""
    x = torch.empty(2, 8, 4096, 64, device="meta")
    spec = spec_of_mask(None, 2, 8, 4096, 4096, x.device)
    there = AttentionCall(x, x, x, spec, AttentionOptions(0.1))
    for cap, result, expected in ((0.0, "out", False), (5.0, "out", True), (0.0, "lse", True)):
        options = AttentionOptions(0.1, cap)
        assert problem_of(replace(there, options=options), result).large_scores == expected
    short = replace(there, query=x[:, :, :100], options=AttentionOptions(0.1, 5.0))
    assert not problem_of(short).large_scores


@pytest.mark.parametrize("lacks", ["AuxRequest", "BACKEND"])
def test_features_decide_not_versions(lacks, tmp_path, monkeypatch):
    """flex is unavailable if torch's source code lacks a feature, whatever torch's version is."""
    source = Path(torch_flex.__file__)
    assert flex._missing_features() == []
    folder = tmp_path / "nn" / "attention"
    folder.mkdir(parents=True)
    (folder / source.name).write_text(source.read_text().replace(lacks, "other"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    (reason,) = flex._missing_features()
    assert lacks in reason
