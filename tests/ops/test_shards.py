"""A shard of a larger call drops the elements that the complete call would drop."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from helpers import BACKENDS, assert_like_eager, device_of, random_qkv

from fused_attn import masks
from fused_attn.backends import cpp, get_backend, problem_of
from fused_attn.base import philox
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.call.norm import NormCall, NormOptions
from fused_attn.call.options import with_options
from fused_attn.distributed.sharding import attention_offsets
from fused_attn.masks.spec import MaskSpec, spec_of_mask
from fused_attn.ops import dispatch, library

EVERY_BACKEND = [*BACKENDS, "eager"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
WHOLE = (3, 4, 70, 144)  # batch, heads, seqlen_q, seqlen_k
SEED, DROPOUT_P = 23, 0.3
ALL = slice(None)
PARTS = {
    "rows": (ALL, ALL, slice(29, 62), ALL),
    "keys": (ALL, ALL, ALL, slice(40, 109)),
    "heads": (ALL, slice(1, 3), ALL, ALL),
    "batch": (slice(1, 3), ALL, ALL, ALL),
    "everything": (slice(1, 3), slice(2, 4), slice(37, 70), slice(64, 144)),
    "query": (slice(1, 3), slice(1, 4), slice(69, 70), slice(8, 144)),
}


FEWER = pytest.mark.thinned("covered by the part 'everything'", part=["rows", "heads", "batch"])


@pytest.fixture(params=list(PARTS))
def part(request):
    return PARTS[request.param]


def kept_weights(part, sizes=WHOLE):
    """Return which weights of a part the complete call keeps, as a bool tensor."""
    return philox.attention_keep(torch.tensor(SEED), DROPOUT_P, *sizes)[part]


def sizes_of(part):
    return tuple(len(range(size)[of]) for size, of in zip(WHOLE, part, strict=True))


def options_of(part, device, scale=1.0):
    """Return the options of the call for a part, with its offsets in the complete call."""
    batch0, head0, row0, key0 = (range(n)[of].start for n, of in zip(WHOLE, part, strict=True))
    offsets = attention_offsets(
        sizes_of(part)[0], row0=row0, key0=key0, head0=head0, num_heads_global=WHOLE[1],
        batch0=batch0, device=device,
    )  # fmt: skip
    return AttentionOptions(scale, 0.0, DROPOUT_P, torch.tensor(SEED, device=device), offsets)


def shard(part, backend, dtype=torch.float32, one_key_head=False):
    """Return the call for one shard; out equals the weights, because value is the identity."""
    batch, heads, seqlen_q, seqlen_k = sizes_of(part)
    device = device_of(backend)
    like = {"dtype": dtype, "device": device}
    heads_kv = 1 if one_key_head else heads
    query = torch.zeros(batch, heads, seqlen_q, 8, **like)
    key = torch.zeros(batch, heads_kv, seqlen_k, 8, **like)
    value = torch.eye(seqlen_k, **like).expand(batch, heads_kv, -1, -1)
    return AttentionCall(query, key, value, MaskSpec(), options_of(part, device))


def assert_keeps(call, backend, keep, with_lse):
    """Assert that dropout keeps exactly the weights that are True in `keep`."""
    out, _ = dispatch.run_attention(call, get_backend(backend), with_lse)
    assert torch.equal((out != 0).cpu(), keep)


@FEWER
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_part_of_the_whole(needs_grad, dtype, part, backend):
    call = shard(part, backend, dtype)
    call.query.requires_grad_(needs_grad)
    assert_keeps(call, backend, kept_weights(part), needs_grad)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_share_keys(dtype, backend):
    part = PARTS["query"]
    assert_keeps(shard(part, backend, dtype, True), backend, kept_weights(part), False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_isa(dtype, part, isa):
    for needs_grad in (False, True):
        test_part_of_the_whole(needs_grad, dtype, part, "cpp")
    for biased in (False, True):
        test_gradients_of_a_part(biased, dtype, part, "cpp")
    test_heads_that_share_keys(dtype, "cpp")


@pytest.mark.thinned("covered by biased calls", dtype=[torch.bfloat16], biased=[False])
@FEWER
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_a_part(biased, dtype, part, backend):
    """The backward of a shard uses the dropout mask Z of the complete call.

    All keys have the same weight P. Kept weights are scaled by c = 1 / (1 - dropout_p), and their
    gradient is 1, so dS = P (c Z - delta) is positive exactly where Z is 1. Keys are the identity,
    so dQ is dS. The first columns of dO are the identity too, so dV is c P Z^T there.
    """
    batch, heads, seqlen_q, seqlen_k = sizes_of(part)
    device = device_of(backend)
    like = {"dtype": dtype, "device": device}
    query, bias = (torch.zeros(sizes_of(part), **like).requires_grad_() for _ in "qb")
    key = torch.eye(seqlen_k, **like).expand(batch, heads, -1, -1)
    value = torch.zeros(batch, heads, seqlen_k, seqlen_q + 1, **like)
    value[..., -1] = 1.0
    value.requires_grad_()
    spec = spec_of_mask(masks.bias(bias) if biased else None, *sizes_of(part), device)
    call = AttentionCall(query, key, value, spec, options_of(part, device))
    out, _ = dispatch.run_attention(call, get_backend(backend), True)
    eye, ones = torch.eye(seqlen_q, **like), torch.ones(seqlen_q, 1, **like)
    out.backward(torch.cat([eye, ones], 1).expand_as(out))
    keep = kept_weights(part)
    assert torch.equal((value.grad[..., :-1] != 0).mT.cpu(), keep)
    assert torch.equal((query.grad > 0).cpu(), keep)
    if biased:
        assert torch.equal((bias.grad > 0).cpu(), keep)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_a_part(dtype, backend):
    """Results of a shard with a mask and GQA are within the numerics contract."""
    part = PARTS["everything"]
    batch, heads, seqlen_q, seqlen_k = sizes_of(part)

    def of(backend):
        def call(query, key, value):
            spec = spec_of_mask(masks.sliding_window(60, 50), *sizes_of(part), query.device)
            options = options_of(part, query.device, scale=0.3)
            call = AttentionCall(query, key, value, spec, options)
            return dispatch.run_attention(call, get_backend(backend), True)

        return call

    assert_like_eager(of, random_qkv(batch, heads, 1, seqlen_q, seqlen_k, 24, 40), dtype, backend)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_packed_sequences(backend):
    """Each packed sequence drops the weights that the complete call drops at its global offsets."""
    device = device_of(backend)
    lengths_q, lengths_k = torch.tensor([33, 1, 20]), torch.tensor([60, 16, 45])
    rows, keys, numbers, heads, head0, all_heads = [5, 40, 0], [8, 0, 64], [3, 0, 6], 2, 3, 6
    query = torch.zeros(1, heads, 54, 8, device=device)
    key = torch.zeros(1, heads, 121, 8, device=device)
    value = torch.cat([torch.eye(60)[:n] for n in lengths_k]).to(device)
    value = value.expand(1, heads, -1, -1).clone().requires_grad_()
    spec = spec_of_mask(masks.padding(lengths_k, lengths_q), 3, heads, 33, 60, device)
    ends = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(device) for n in (lengths_q, lengths_k)]
    spec = replace(
        spec, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=33, max_seqlen_k=60
    )
    head_words = [number * all_heads + head0 for number in numbers]
    offsets = torch.tensor([rows, keys, head_words], device=device).T.contiguous()
    options = replace(options_of(PARTS["query"], device), dropout_offsets=offsets)
    call = AttentionCall(query, key, value, spec, options)
    for with_lse in (False, True):
        with torch.set_grad_enabled(with_lse):
            out, _ = dispatch.run_attention(call, get_backend(backend), with_lse)
        kept = (out != 0)[0].split(lengths_q.tolist(), dim=1)
        for got, i, j, number, n in zip(kept, rows, keys, numbers, lengths_k, strict=True):
            visible = slice(head0, head0 + heads), slice(i, i + got.shape[1]), slice(j, j + n)
            want = kept_weights((number, *visible), (7, all_heads, 64, 120))
            assert torch.equal(got[..., :n].cpu(), want)


@FEWER
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_weights(part, backend):
    keep, call = kept_weights(part), shard(part, backend)
    _, weights = dispatch.run_weights(call, False, backend)
    assert torch.equal((weights != 0).cpu(), keep)
    _, average = dispatch.run_weights(call, True, backend)
    one = philox.dropout_scale(DROPOUT_P) / keep.shape[3] / keep.shape[1]
    assert torch.equal((average / one).round().long().cpu(), keep.sum(1))


@FEWER
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("average", [False, True])
def test_gradient_of_weights(average, part, backend):
    """The backward of returned weights drops the weights that the complete call drops.

    Keys are the identity, so dQ is positive exactly for the weights that are kept.
    """
    call = shard(part, backend)
    eye = call.value
    query = eye.new_zeros(*call.query.shape[:3], eye.shape[-1]).requires_grad_()
    call = replace(call, query=query, key=eye)
    dispatch.run_weights(call, average, backend)[1].sum().backward()
    assert torch.equal((query.grad > 0).cpu(), kept_weights(part))


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_counters_have_32_bits(backend):
    """Counters of rows, of heads and of groups of 8 keys wrap around at 2**32."""
    call = shard(PARTS["query"], backend)
    far = torch.tensor([1 << 32, 1 << 35, 1 << 32], device=call.query.device)
    call = with_options(call, dropout_offsets=call.options.dropout_offsets + far)
    for with_lse in (False, True):
        assert_keeps(call, backend, kept_weights(PARTS["query"]), with_lse)
    batch, heads, seqlen_q, seqlen_k = sizes_of(PARTS["rows"])
    near = torch.tensor([(1 << 32) - 3, 40, 7]).repeat(3, 1)
    call = with_options(shard(PARTS["rows"], backend), dropout_offsets=near.to(call.query.device))
    keep_of = functools.partial(philox.attention_keep, torch.tensor(SEED), DROPOUT_P, batch, heads)
    keep = keep_of(seqlen_q, seqlen_k, offsets=near)
    after = keep_of(seqlen_q - 3, seqlen_k, offsets=torch.tensor([0, 40, 7]).expand(3, 3))
    assert torch.equal(keep[:, :, 3:], after)
    assert_keeps(call, backend, keep, True)


def norm_shard(backend, dtype, columns, rms, batch0, rows):
    """Return a call for a shard of 5 sequences of 20 rows, and its mask of kept elements."""
    device, runs = device_of(backend), len(batch0)
    x = torch.ones(runs * len(range(20)[rows]), columns, dtype=dtype, device=device)
    offsets = torch.tensor([20 * sequence + rows.start for sequence in batch0], device=device)
    seed = torch.tensor(SEED, device=device)
    call = NormCall(x, None, None, None, NormOptions(1e-5, rms, DROPOUT_P, seed, offsets))
    keep = philox.norm_keep(seed.cpu(), DROPOUT_P, 100, columns)
    return call, keep.reshape(5, 20, columns)[batch0, rows].reshape(x.shape)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [3, 64, 193])
@pytest.mark.parametrize("batch0", [[0], [1, 2, 3], [4, 0]], ids=str)
def test_norms(batch0, columns, dtype, backend):
    for rms in (False, True):
        call, keep = norm_shard(backend, dtype, columns, rms, batch0, slice(7, 18))
        _, inferred = dispatch.run_norm(call, True, backend)
        call.input.requires_grad_()
        _, total = dispatch.run_norm(call, True, backend)
        total.sum().backward()
        for got in (inferred, total, call.input.grad):
            assert torch.equal((got != 0).cpu(), keep)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_on_every_isa(dtype, isa):
    test_norms([4, 0], 193, dtype, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_norms(backend):
    """Shards of wide rows, which kernels split into chunks, drop what a complete call drops."""
    call, keep = norm_shard(backend, torch.float32, 40000, False, [3, 1], slice(18, 20))
    call.input.requires_grad_()
    _, total = dispatch.run_norm(call, True, backend)
    total.sum().backward()
    for got in (total, call.input.grad):
        assert torch.equal((got != 0).cpu(), keep)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ops(backend):
    call = shard(PARTS["everything"], backend)
    attention, backend_ = torch.ops.fused_attn, get_backend(backend)
    torch.library.opcheck(attention.attention_fwd.default, (*call.flat(), True, True, backend))
    outputs = library.attention_fwd(call, backend_, True, True)
    rest = (*outputs, torch.randn_like(outputs.out), None, False, backend)
    torch.library.opcheck(attention.attention_bwd.default, (*call.flat(), *rest))
    call, _ = norm_shard(backend, torch.float32, 64, True, [1, 2], slice(7, 18))
    torch.library.opcheck(attention.norm_fwd.default, (*call.flat(), backend))


def test_second_order():
    batch, heads, *seqlens = sizes_of(PARTS["everything"])
    tensors = random_qkv(batch, heads, heads, *seqlens, 8)
    leaves = {n: t.double().requires_grad_() for n, t in tensors.items()}
    call = replace(shard(PARTS["everything"], "cpp"), **leaves)
    results = []
    for backend in ("cpp", "eager"):
        out, _ = dispatch.run_attention(call, get_backend(backend), True)
        grads = torch.autograd.grad(out.square().sum(), leaves.values(), create_graph=True)
        loss = sum(grad.square().sum() for grad in grads)
        results.append(torch.autograd.grad(loss, leaves.values()))
    torch.testing.assert_close(*results)


def test_attention_offsets():
    offsets = attention_offsets(
        3, row0=1, key0=8, head0=4, num_heads_global=6, batch0=5, device="cpu"
    )
    assert offsets.tolist() == [[1, 8, 34], [1, 8, 40], [1, 8, 46]]
    assert offsets.dtype == torch.int64 and offsets.is_contiguous()
    assert attention_offsets(0, head0=0, num_heads_global=3, device="cpu").shape == (0, 3)


def test_invalid_dropout_offsets():
    call = shard(PARTS["everything"], "cpp")
    right = call.options.dropout_offsets
    for offsets in (right[:1], right.int(), right[:, :2], right.flatten()):
        wrong = with_options(call, dropout_offsets=offsets)
        with pytest.raises(ValueError, match=r"int64 on cpu with shape \(2, 3\), got"):
            torch.ops.fused_attn.attention_fwd(*wrong.flat(), True, True, "cpp")
    for offsets in (right[:1], right.int(), right[:, :2]):
        with pytest.raises(ValueError, match="dropout_offsets must"):
            cpp._cpu.attention_fwd(with_options(call, dropout_offsets=offsets), False, False, 1)
    norm, _ = norm_shard("cpp", torch.float32, 8, True, [1, 2], slice(7, 18))
    for offsets in (torch.zeros(3).long(), torch.zeros(2), norm.options.dropout_offsets[None]):
        wrong = with_options(norm, dropout_offsets=offsets)
        with pytest.raises(ValueError, match="with one dimension, whose size divides 22, got"):
            torch.ops.fused_attn.norm_fwd(*wrong.flat(), "cpp")


def test_sdpa_does_not_support_dropout_of_shards():
    norm, _ = norm_shard("cpp", torch.float32, 8, True, [1, 2], slice(7, 18))
    for call in (shard(PARTS["rows"], "cpp"), norm):
        call = with_options(call, seed=None)
        problem = problem_of(call)
        assert "sharded" in repr(problem)
        assert not any(get_backend(name).unsupported(problem) for name in ("cpp", "eager"))
        assert "as in the global call" in str(get_backend("sdpa").unsupported(problem))
        without_dropout = problem_of(with_options(call, dropout_p=0.0))
        reasons = str(get_backend("sdpa").unsupported(without_dropout))
        assert "as in the global call" not in reasons
