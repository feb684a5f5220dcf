"""compile_pass fuses many forms of hand-written attention, and leaves other code unchanged."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

from fused_attn import compile_pass
from fused_attn.tools import contract

B, H, L, D = 2, 3, 40, 16
INF = float("-inf")
CAUSAL = torch.ones(L, L).tril().bool()
PADDING = torch.arange(L)[None, None, None] < torch.tensor([L, 25])[:, None, None, None]
BIAS = torch.randn(H, L, L, generator=torch.Generator().manual_seed(0))


def compiled(function, attention):
    """Compile a function with the pass, but without code generation."""

    def backend(graph, inputs):
        attention(graph.graph)
        graph.recompile()
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, H, L, D, generator=generator).to(dtype) for _ in range(3)]


def nanogpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(CAUSAL[None, None, :L, :L] == 0, INF)
    return F.softmax(att, dim=-1) @ v


def annotated_transformer(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(PADDING == 0, -1e9)
    return torch.matmul(F.dropout(scores.softmax(dim=-1), 0.5, training=False), v)


def vit(q, k, v):
    dots = torch.matmul(q * D**-0.5, k.transpose(-1, -2))
    return torch.matmul(torch.nn.Softmax(dim=-1)(dots), v)


def esm(q, k, v):
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2))
    weights += CAUSAL.to(q.dtype).log().unsqueeze(0)
    weights = weights.view(B, H, L, L).masked_fill(~PADDING, INF).view(B * H, L, L)
    floats = F.softmax(weights, dim=-1, dtype=torch.float32)
    return torch.bmm(floats.type_as(weights), v).view(B, H, L, D)


def swin(q, k, v):
    """Swin's attention, which views scores by window to add the mask of shifted windows."""
    attn = (q @ k.transpose(-2, -1)) * D**-0.5 + BIAS.to(q.dtype).unsqueeze(0)
    mask = torch.where(CAUSAL, 0.0, -100.0).to(q.dtype).expand(B, L, L)
    attn = attn.view(B // 2, 2, H, L, L) + mask.unsqueeze(1).unsqueeze(0)
    return attn.view(-1, H, L, L).softmax(-1) @ v


def sam(q, k, v):
    """SAM's attention, which views scores by row and column to add a bias for each."""
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    attn = q @ k.transpose(-2, -1) / 4
    rows, columns = (torch.linspace(-1, 2, n, dtype=q.dtype) for n in (20, 32))
    attn = (
        attn.view(B * H, 5, 8, 5, 8)
        + rows.view(1, 1, 4, 5, 1)[:, :, :1]
        + columns.view(1, 1, 1, 4, 8)[:, :, :, :1]
    ).view(B * H, L, L)
    return (attn.softmax(dim=-1) @ v).view(B, H, L, D)


def einsum(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    sim = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    sim.masked_fill_(~PADDING, -torch.finfo(sim.dtype).max)
    return torch.einsum("bhij,bjhd->bihd", sim.softmax(dim=-1), v).transpose(1, 2)


def one_head_of_keys(q, k, v):
    sim = torch.einsum("b h i d, b j d -> b h i j", q, k[:, 0])
    return torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v[:, 0])


def alibi_by_baddbmm(q, k, v):
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    bias = BIAS[:, :1].to(q.dtype).repeat(B, 1, 1)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.25).view(B, H, L, L)
    return torch.bmm(scores.softmax(-1).view(B * H, L, L), v).view(B, H, L, D)


def t5(q, k, v):
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += BIAS
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


def gpt2(q, k, v):
    weights = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], D**0.5, dtype=q.dtype)
    lowest = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
    return torch.matmul(torch.where(CAUSAL, weights, lowest).softmax(-1), v)


def swin_v2(q, k, v):
    attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    bias = BIAS.to(q.dtype)
    attn = attn * bias[:, :1, :1].exp() + 16 * torch.sigmoid(bias)
    return attn.softmax(-1) @ v


def capped(q, k, v):
    scores = torch.tanh((q @ k.mT) * 0.25 / 5.0) * 5.0
    return (scores - 1e4 * (~CAUSAL).to(q.dtype)).softmax(-1) @ v


def espnet(q, k, v):
    """ESPnet's attention, which also sets the weights of padding keys to 0 after the softmax."""
    hidden = PADDING.eq(0)
    scores = torch.matmul(q, k.transpose(-2, -1)) / 4.0
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0), v)


def in_steps(q, k, v):
    """Attention with in-place operations on the scores, whose return values are unused."""
    scores = q @ k.transpose(-2, -1)
    scores.mul_(0.25)
    scores.masked_fill_(~CAUSAL, INF)
    scores.add_(BIAS)
    return torch.nan_to_num(scores.softmax(-1)) @ v


def shifted(q, k, v):
    """Attention that subtracts the row maximum from scores, and computes a mean without use."""
    sim = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    weights = sim.softmax(dim=-1, dtype=torch.float32)
    weights.type_as(sim).mean(1)
    return torch.einsum("bhij,bhjd->bhid", weights.type_as(weights.type_as(q)), v)


def viewed(q, k, v):
    """Attention whose result is reshaped by view(), which requires the strides of a matmul."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).view(B, H * L, D)


def by_name(q, k, v):
    """Attention whose operations receive their inputs by keyword."""
    scores = 8.0 * torch.tanh(input=torch.matmul(input=q, other=k.transpose(-2, -1)) / 8)
    scores = torch.masked_fill(input=scores, mask=~PADDING, value=INF)
    scores = torch.where(CAUSAL, scores, torch.full((), fill_value=INF, dtype=q.dtype))
    scores = scores - torch.amax(input=scores, dim=-1, keepdim=True)
    return F.softmax(input=scores, dim=-1) @ v


def added_by_name(q, k, v):
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    scores = torch.baddbmm(input=BIAS.to(q.dtype).repeat(B, 1, 1), batch1=q, batch2=k.mT)
    return (scores.softmax(-1) @ v).view(B, H, L, D)


def unsigned_bias(q, k, v):
    return (q @ k.mT - CAUSAL.to(torch.uint8)).softmax(-1) @ v


FUSED = [
    nanogpt, annotated_transformer, vit, esm, swin, sam, einsum, one_head_of_keys, alibi_by_baddbmm,
    t5, gpt2, swin_v2, capped, espnet, in_steps, shifted, viewed, by_name, added_by_name,
    unsigned_bias,
]  # fmt: skip


def check(function, dtype=torch.float32, gradients=True, **more):
    """Assert that a function of query, key, value and `more` is fused, and return the verdict."""
    inputs = dict(zip(("query", "key", "value"), operands(dtype), strict=True)) | more
    attention = compile_pass()
    run = compiled(function, attention)
    with torch.set_grad_enabled(gradients):
        verdict = contract.check(run, function, inputs, dtype, gradients=gradients)
    assert verdict.ok, verdict.worst
    assert attention.fused == len(attention.found) == 1, attention
    return verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUSED, ids=lambda function: function.__name__)
def test_fused_functions(function, dtype):
    check(function, dtype)
    if dtype == torch.float32:  # once is enough: the graph is the same with and without gradients
        check(function, gradients=False)


def attend(q, k, v, mask=None, fill=INF, bias=None, dropout_p=0.0):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(mask, fill)
    return F.dropout(scores.softmax(-1), dropout_p) @ v


def test_gradient_of_a_bias():
    verdict = check(lambda q, k, v, bias: attend(q, k, v, ~CAUSAL, bias=bias), bias=BIAS)
    assert "grad bias" in [finding.name for finding in verdict.findings]


MASKED_SEQUENCE = torch.tensor([False, True])[:, None, None, None].expand(B, 1, 1, L)


@pytest.mark.parametrize("fill", [-1e9, -1e4, -torch.finfo(torch.float32).max])
def test_rows_fully_masked_with_a_finite_score(fill):
    """Rows fully masked with a finite score return the mean of V, as in eager attention."""
    check(lambda q, k, v: attend(q, k, v, MASKED_SEQUENCE, fill))


def test_rows_fully_masked_with_infinity_are_0():
    q, k, v = operands()
    out = compiled(lambda q, k, v: attend(q, k, v, MASKED_SEQUENCE), compile_pass())(q, k, v)
    assert out[1].eq(0).all() and torch.allclose(out[0], attend(q, k, v)[0], atol=1e-5)


def test_dropout_in_training():
    q, k, v = operands()
    attention = compile_pass()
    run = compiled(lambda q, k, v: attend(q, k, v, dropout_p=0.5), attention)
    torch.manual_seed(0)
    outs = torch.stack([run(q, k, v) for _ in range(300)])
    assert attention.fused == 1
    assert not torch.equal(outs[0], outs[1])
    assert (outs.mean(0) - attend(q, k, v)).abs().max() < 0.3
    torch.manual_seed(0)
    assert torch.equal(run(q, k, v), outs[0])


def reshaped_by_name(q, k, v):
    scores = torch.reshape(input=q @ k.transpose(-2, -1), shape=(B * H, L, L))
    return scores.softmax(-1).view(B, H, L, L) @ v


def weights_too(q, k, v):
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v, weights


def written_between(q, k, v):
    scores = q @ k.transpose(-2, -1)
    v = v.clone()
    weights = scores.softmax(-1)
    v.mul_(2.0)
    return weights @ v


def bias_of_scores(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return (scores + torch.relu(scores)).softmax(-1) @ v


def scores_too(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v + scores.amax()


def in_a_buffer(q, k, v):
    scores = torch.zeros(B * H, L, L)
    weights = scores.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).softmax(-1)
    return weights @ v.flatten(0, 1) + scores[..., :D]


def tanh_of_shifted(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return torch.tanh(scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def filled_after_a_shift(q, k, v):
    scores = q @ k.transpose(-2, -1) * 3e4
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.masked_fill(~CAUSAL, -1e4).softmax(-1) @ v


# Case -> (function that is not fused, part of the reason).
UNFUSED = {
    "filled after a shift": (filled_after_a_shift, "masked by a finite number"),
    "NaN becomes uniform": (
        lambda q, k, v: (q @ k.mT).masked_fill(~PADDING, INF).softmax(-1).nan_to_num(nan=1 / L) @ v,
        "another number than 0",
    ),
    "in a buffer": (in_a_buffer, "existing tensor"),
    "integers": (lambda q, k, v: (q @ k.mT).to(torch.int32).float().softmax(-1) @ v, "to integers"),
    "tanh of shifted scores": (tanh_of_shifted, "tanh is applied to"),
    "weights are returned": (weights_too, "or by more than one"),
    "no scores": (lambda q, k, v: torch.relu(q).softmax(-1), "scores depend on relu"),
    "two products": (
        lambda q, k, v: (q @ k.mT * (k @ q.mT)).softmax(-1) @ v,
        "differs between keys",
    ),
    "written in between": (written_between, "in place"),
    "scores are returned": (scores_too, "also used by"),
    "bias depends on scores": (bias_of_scores, "depends on the scores"),
    "bias with more heads": (
        lambda q, k, v: (q[:, :1] @ k[:, :1].mT + BIAS).softmax(-1) @ v,
        "enlarges",
    ),
    "values in float64": (
        lambda q, k, v: ((q @ k.mT).softmax(-1).double() @ v.double()).to(q.dtype),
        "same floating-point dtype",
    ),
    "fill value too large for a mask": (
        lambda q, k, v: (q @ k.mT).masked_fill(CAUSAL, -2.0).softmax(-1) @ v,
        "above -10000",
    ),
    "scaled after the mask": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~CAUSAL, -2e4) * 0.25).softmax(-1) @ v,
        "factor after the mask",
    ),
    "reshaped by name": (reshaped_by_name, "keyword arguments"),
    "softmax in float64": (
        lambda q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float64).to(q.dtype) @ v,
        "float64",
    ),
    "softmax over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, None),
    "weights as second factor": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1), "weights"),
}


@pytest.mark.parametrize(("function", "reason"), UNFUSED.values(), ids=UNFUSED)
def test_unfused_functions(function, reason):
    attention = compile_pass()
    q, k, v = operands()
    torch.testing.assert_close(compiled(function, attention)(q, k, v), function(q, k, v))
    assert attention.fused == 0
    if reason is not None:
        (found,) = attention.found
        assert reason in found.reason and "test_compile_pass.py:" in found.site
        assert reason in repr(attention)


def test_inductor_with_varying_lengths():
    """The pass, as an option of torch.compile, fuses training attention of varying lengths."""
    attention = compile_pass()
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: esm_like(q, k, v).sin(), options=attention.options)
    for length in (24, 33, 36):
        given = [t[:, :, :length].clone().requires_grad_() for t in operands()]
        out, want = run(*given), esm_like(*given).sin()
        torch.testing.assert_close(out, want)
        got = torch.autograd.grad(out.sum(), given)
        torch.testing.assert_close(got, torch.autograd.grad(want.sum(), given))
    assert 1 <= attention.fused == len(attention.found) <= 2


def esm_like(q, k, v):
    length = q.size(2)
    q, k, v = (t.reshape(B * H, length, D) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).view(B, H, length, length)
    weights = weights.masked_fill(~PADDING[..., :length], INF).view(B * H, length, length)
    return torch.bmm(weights.softmax(-1), v).view(B, H, length, D)


def test_under_autocast():
    q, k, v = operands()
    attention = compile_pass()

    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v, ~CAUSAL)

    # assert_close also compares the dtypes.
    out = compiled(function, attention)(q, k, v)
    torch.testing.assert_close(out, function(q, k, v), atol=2e-2, rtol=2e-2)
    assert attention.fused == 1


@pytest.mark.small_calls
@pytest.mark.parametrize("needs_grad", [False, True])
def test_small_attention_is_left_to_inductor(needs_grad):
    """The pass does not fuse attention over 40 tokens, nor over 128 tokens with gradients."""
    for length, fused in ((40, False), (128, not needs_grad)):
        attention = compile_pass()
        given = [torch.randn(4, 4, length, 16, requires_grad=needs_grad) for _ in range(3)]
        compiled(attend, attention)(*given)
        (found,) = attention.found
        assert bool(attention.fused) == fused and ("small" in found.reason) != fused
