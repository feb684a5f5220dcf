"""A shard of a larger call drops the elements that the complete call would drop."""

from __future__ import annotations

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


# Slow backends run only the two parts that have an offset in each dimension.
FEWER = pytest.mark.thinned("covered by the part 'everything'", part=["rows", "heads", "batch"])


@pytest.fixture(params=list(PARTS))
def part(request):
    return PARTS[request.param]


def seed_on(device):
    return torch.tensor(SEED, device=device)


def whole_keep(whole=WHOLE):
    return philox.attention_keep(torch.tensor(SEED), DROPOUT_P, *whole)


def sizes_of(part):
    return tuple(len(range(size)[of]) for size, of in zip(WHOLE, part, strict=True))


def origin_of(part, device):
    batch0, head0, row0, key0 = (range(n)[of].start for n, of in zip(WHOLE, part, strict=True))
    return attention_offsets(
        sizes_of(part)[0], row0=row0, key0=key0, head0=head0, num_heads_global=WHOLE[1],
        batch0=batch0, device=device,
    )  # fmt: skip


def shard(part, backend, dtype=torch.float32, one_key_head=False):
    """Return the call for one shard; out equals the weights, because value is the identity."""
    batch, heads, seqlen_q, seqlen_k = sizes_of(part)
    there = {"dtype": dtype, "device": device_of(backend)}
    heads_kv = 1 if one_key_head else heads
    query = torch.zeros(batch, heads, seqlen_q, 8, **there)
    key = torch.zeros(batch, heads_kv, seqlen_k, 8, **there)
    value = torch.eye(seqlen_k, **there).expand(batch, heads_kv, -1, -1)
    offsets = origin_of(part, there["device"])
    options = AttentionOptions(1.0, 0.0, DROPOUT_P, seed_on(there["device"]), offsets)
    return AttentionCall(query, key, value, MaskSpec(), options)


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
    assert_keeps(call, backend, whole_keep()[part], needs_grad)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_share_keys(dtype, backend):
    part = PARTS["query"]
    assert_keeps(shard(part, backend, dtype, True), backend, whole_keep()[part], False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_isa(dtype, part, isa):
    for needs_grad in (False, True):
        test_part_of_the_whole(needs_grad, dtype, part, "cpp")
        test_gradients_of_a_part(needs_grad, dtype, part, "cpp")
    test_heads_that_share_keys(dtype, "cpp")


@pytest.mark.thinned(
    "covered by biased calls", dtype=[torch.float16, torch.bfloat16], biased=[False]
)
@pytest.mark.thinned("covered by bfloat16", dtype=[torch.float16])
@FEWER
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_a_part(biased, dtype, part, backend):
    """Gradients of a shard show the dropout mask Z of the complete call.

    All keys have the same weight P. Z scales kept weights by c = 1 / (1 - dropout_p), and their
    gradient is 1, so dS = P (c Z - delta) is positive exactly where Z is 1. Keys are the identity,
    so dQ is dS. The first columns of dO are the identity too, so dV is c P Z^T there.
    """
    batch, heads, seqlen_q, seqlen_k = sizes_of(part)
    there = {"dtype": dtype, "device": device_of(backend)}
    query = torch.zeros(batch, heads, seqlen_q, seqlen_k, **there).requires_grad_()
    key = torch.eye(seqlen_k, **there).expand(batch, heads, -1, -1)
    value = torch.zeros(batch, heads, seqlen_k, seqlen_q + 1, **there)
    value[..., -1] = 1.0
    value.requires_grad_()
    bias = torch.zeros(batch, heads, seqlen_q, seqlen_k, **there).requires_grad_()
    mask = masks.bias(bias) if biased else None
    spec = spec_of_mask(mask, batch, heads, seqlen_q, seqlen_k, query.device)
    offsets = origin_of(part, there["device"])
    options = AttentionOptions(1.0, 0.0, DROPOUT_P, seed_on(there["device"]), offsets)
    out, _ = dispatch.run_attention(
        AttentionCall(query, key, value, spec, options), get_backend(backend), True
    )
    eye, ones = torch.eye(seqlen_q, **there), torch.ones(seqlen_q, 1, **there)
    out.backward(torch.cat([eye, ones], 1).expand_as(out))
    keep = whole_keep()[part]
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
            spec = spec_of_mask(
                masks.sliding_window(60, 50), batch, heads, seqlen_q, seqlen_k, query.device
            )
            offsets = origin_of(part, query.device)
            options = AttentionOptions(0.3, 0.0, DROPOUT_P, seed_on(query.device), offsets)
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
    whole = whole_keep((7, all_heads, 64, 120))
    query = torch.zeros(1, heads, 54, 8, device=device)
    key = torch.zeros(1, heads, 121, 8, device=device)
    value = torch.cat([torch.eye(60)[: int(n)] for n in lengths_k]).to(device)
    spec = spec_of_mask(masks.padding(lengths_k, lengths_q), 3, heads, 33, 60, query.device)
    ends = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(device) for n in (lengths_q, lengths_k)]
    spec = replace(
        spec, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=33, max_seqlen_k=60
    )
    head_words = [number * all_heads + head0 for number in numbers]
    offsets = torch.tensor([rows, keys, head_words], device=device).T.contiguous()
    value = value.expand(1, heads, -1, -1).clone().requires_grad_()
    options = AttentionOptions(1.0, 0.0, DROPOUT_P, seed_on(device), offsets)
    call = AttentionCall(query, key, value, spec, options)
    for with_lse in (False, True):
        with torch.set_grad_enabled(with_lse):
            out, _ = dispatch.run_attention(call, get_backend(backend), with_lse)
        for b in range(3):
            got = out[0, :, ends[0][b] : ends[0][b + 1]].detach().cpu() != 0
            i, j, n = rows[b], keys[b], int(lengths_k[b])
            want = whole[numbers[b], head0 : head0 + heads, i : i + got.shape[1], j : j + n]
            assert torch.equal(got[..., :n], want)


@FEWER
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_weights(part, backend):
    keep, call = whole_keep()[part], shard(part, backend)
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

    The signs of dQ show which weights are dropped.
    """
    call = shard(part, backend)
    seqlen_k = call.key.shape[2]
    eye = torch.eye(seqlen_k, device=call.key.device).expand(*call.key.shape[:2], -1, -1)
    query = eye.new_zeros(*call.query.shape[:3], seqlen_k).requires_grad_()
    call = replace(call, query=query, key=eye)
    dispatch.run_weights(call, average, backend)[1].sum().backward()
    assert torch.equal((query.grad > 0).cpu(), whole_keep()[part])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_counters_have_32_bits(backend):
    call = shard(PARTS["query"], backend)
    far = torch.tensor([1 << 32, 1 << 35, 1 << 32], device=call.query.device)
    call = with_options(call, dropout_offsets=call.options.dropout_offsets + far)
    for with_lse in (False, True):
        assert_keeps(call, backend, whole_keep()[PARTS["query"]], with_lse)
    near = torch.tensor([(1 << 32) - 3, 40, 7], device=call.query.device)
    call = with_options(
        shard(PARTS["rows"], backend), dropout_offsets=near.expand(3, 3).contiguous()
    )
    batch, heads, seqlen_q, seqlen_k = sizes_of(PARTS["rows"])
    sizes, offsets = (batch, heads, seqlen_q, seqlen_k), call.options.dropout_offsets.cpu()
    keep = philox.attention_keep(torch.tensor(SEED), DROPOUT_P, *sizes, offsets=offsets)
    assert torch.equal(keep[:, :, 3:], philox.attention_keep(
        torch.tensor(SEED), DROPOUT_P, batch, heads, seqlen_q - 3, seqlen_k,
        offsets=torch.tensor([0, 40, 7]).expand(3, 3),
    ))  # fmt: skip
    assert_keeps(call, backend, keep, True)


# ---- norms --------------------------------------------------------------------------------------


def norm_shard(backend, dtype, columns, rms, batch0, rows):
    """Return a call for a shard of 5 sequences of 20 rows, and its mask of kept elements."""
    device, runs = device_of(backend), len(batch0)
    x = torch.ones(runs * len(range(20)[rows]), columns, dtype=dtype, device=device)
    offsets = torch.tensor([20 * sequence + rows.start for sequence in batch0], device=device)
    call = NormCall(
        x, None, None, None, NormOptions(1e-5, rms, DROPOUT_P, seed_on(device), offsets)
    )
    keep = philox.norm_keep(torch.tensor(SEED), DROPOUT_P, 100, columns)
    return call, keep.reshape(5, 20, columns)[batch0, rows].reshape(x.shape)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [3, 64, 193])
@pytest.mark.parametrize("batch0", [[0], [1, 2, 3], [4, 0]], ids=str)
def test_norms(batch0, columns, dtype, backend):
    for rms in (False, True):
        call, keep = norm_shard(backend, dtype, columns, rms, batch0, slice(7, 18))
        _, total = dispatch.run_norm(call, True, backend)
        assert torch.equal((total != 0).cpu(), keep)
        call.input.requires_grad_()
        total = dispatch.run_norm(call, True, backend)[1]
        assert torch.equal((total != 0).cpu(), keep)
        total.sum().backward()
        assert torch.equal((call.input.grad != 0).cpu(), keep)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_on_every_isa(dtype, isa):
    test_norms([4, 0], 193, dtype, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_norms(backend):
    """Shards of norms with rows in several chunks drop the elements that complete calls drop."""
    call, keep = norm_shard(backend, torch.float32, 40000, False, [3, 1], slice(18, 20))
    call.input.requires_grad_()
    total = dispatch.run_norm(call, True, backend)[1]
    total.sum().backward()
    for got in (total, call.input.grad):
        assert torch.equal((got != 0).cpu(), keep)


# ---- torch's machinery --------------------------------------------------------------------------


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
    part = PARTS["everything"]
    sizes = sizes_of(part)
    tensors = random_qkv(*sizes[:2], *sizes[1:], 8).values()
    call = shard(part, "cpp", torch.float64)

    def second(backend):
        leaves = [t.double().requires_grad_() for t in tensors]
        own = replace(call, query=leaves[0], key=leaves[1], value=leaves[2])
        out, _ = dispatch.run_attention(own, get_backend(backend), True)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad([grad.square().sum() for grad in grads], leaves)

    for got, want in zip(second("cpp"), second("eager"), strict=True):
        torch.testing.assert_close(got, want)


def test_attention_offsets():
    offsets = attention_offsets(
        3, row0=1, key0=8, head0=4, num_heads_global=6, batch0=5, device="cpu"
    )
    assert offsets.tolist() == [[1, 8, 34], [1, 8, 40], [1, 8, 46]]
    assert offsets.dtype == torch.int64 and offsets.is_contiguous()
    assert attention_offsets(0, head0=0, num_heads_global=3, device="cpu").shape == (0, 3)


# ---- errors -------------------------------------------------------------------------------------


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
    for offsets in (
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2),
        norm.options.dropout_offsets[None],
    ):
        wrong = with_options(norm, dropout_offsets=offsets)
        with pytest.raises(ValueError, match="with one dimension, whose size divides 22, got"):
            torch.ops.fused_attn.norm_fwd(*wrong.flat(), "cpp")


def test_torchs_own_kernels_refuse():
    norm, _ = norm_shard("cpp", torch.float32, 8, True, [1, 2], slice(7, 18))
    for call in (shard(PARTS["rows"], "cpp"), norm):
        call = with_options(call, seed=None)
        reasons = get_backend("sdpa").unsupported(problem_of(call))
        assert any("as in the global call" in reason for reason in reasons)
        assert "sharded" in repr(problem_of(call))
        undropped = problem_of(with_options(call, dropout_p=0.0))
        assert not any(
            "as in the global call" in why for why in get_backend("sdpa").unsupported(undropped)
        )
        assert all(not get_backend(name).unsupported(problem_of(call)) for name in ("cpp", "eager"))
