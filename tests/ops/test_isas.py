"""CPU kernels of each instruction set; `make test-isas` runs further tests on each of them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import (
    DTYPES,
    assert_like_eager,
    attention,
    drawn,
    random_qkv,
    short,
    use_isa,
    use_threads,
)
from mask_cases import MASKS, OTHER_MASKS
from norm_cases import norm, tensors_of

from fused_attn import masks
from fused_attn import scaled_dot_product_attention as sdpa
from fused_attn.backends import cpp, get_backend
from fused_attn.call.norm import NormCall, NormOptions


def draw_qkv(seqlen_q, seqlen_k, dtype=torch.float32, head_dim=32):
    """Return query, key and value for one sequence and one head."""
    return [t.to(dtype) for t in random_qkv(1, 1, 1, seqlen_q, seqlen_k, head_dim).values()]


@OTHER_MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_attention(name, dtype, isa):
    mask = MASKS[name](3, 4, 75, 149)  # float32 calls with at most 64 queries do not run on AMX
    tensors = random_qkv(3, 4, 2, 75, 149, 36, 20)
    assert_like_eager(attention(mask, enable_gqa=True), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_odd_row_strides(dtype, isa):
    """Results for rows with an odd stride are bitwise identical to those for contiguous rows."""
    strided = torch.randn(3, 1, 2, 64, 65, generator=drawn(0), dtype=dtype)[..., :64]
    results = []
    for tensors in (strided, strided.contiguous()):
        leaves = [x.requires_grad_() for x in tensors.unbind()]
        out = sdpa(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    assert all(map(torch.equal, *results))


def test_sums_over_keys(isa):
    """Sums of a few large and many small weights are within the numerics contract."""
    mask = masks.sliding_window(27, 15) & masks.alibi([2.0**-4, 2.0**-8])
    tensors = random_qkv(2, 2, 1, 70, 139, 16)
    assert_like_eager(attention(mask, enable_gqa=True), tensors, torch.float32, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_bias_softcap_dropout(dtype, isa):
    tensors = random_qkv(2, 4, 2, 45, 149, 36, 20)
    tensors["bias"] = torch.randn(4, 45, 149, generator=drawn(1))
    options = {"softcap": 4.0, "dropout_p": 0.3, "enable_gqa": True}
    assert_like_eager(attention(masks.causal(), **options), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norm(kind, dtype, isa):
    tensors = tensors_of(kind, (70, 93), True, True)
    assert_like_eager(norm(kind, dropout_p=0.2), tensors, dtype, "cpp")


def total_of(input, residual):
    call = NormCall(input, residual, None, None, NormOptions(1.0, True))
    return get_backend("cpp").norm_fwd(call, True, True).total


def test_conversions_of_16_bit_types(isa):
    """Conversions to and from 16-bit types round as torch's do, and preserve infinity and NaN."""
    every = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16)[:, None]
    big = torch.randn(4096, 1, generator=drawn(0)) * 3e4
    cases = [(every, torch.zeros_like(every))]
    for dtype in (torch.float16, torch.bfloat16):
        nonfinite = torch.tensor([[torch.inf], [-torch.inf], [torch.nan]], dtype=dtype)
        cases.append((nonfinite, torch.zeros_like(nonfinite)))
        # Sums that are rounded to even, overflow or underflow.
        cases.append((big.to(dtype), big.flip(0).to(dtype) * 2**-7))
    for x, residual in cases:
        want = (x.float() + residual.float()).to(x.dtype)
        torch.testing.assert_close(total_of(x, residual), want, rtol=0, atol=0, equal_nan=True)


def test_scores_of_float16_have_float32_accuracy(isa):
    """The lse of a single key, which is its score, has float32 accuracy for float16 inputs."""
    query, key = torch.randn(2, 64, 8, 1, 40, generator=drawn(0)).half()
    _, lse = sdpa(query, key, key, return_lse=True)
    terms = query.double() * key.double() * 40**-0.5
    truth = terms.sum(-1)
    # Relative errors reach 2^-22 for float32 sums of 40 terms; with 17-bit operands, 2^-17.
    assert ((lse - truth).abs() <= 2.0**-21 * (terms.norm(dim=-1) + truth.abs())).all()


def test_small_float32_calls_run_on_avx512():
    """Small float32 calls run on AVX-512 instead of AMX, forward and backward."""
    if not cpp.isa().startswith("amx"):
        pytest.skip("reason: AMX is not the default here")

    def run(isa, *seqlens):
        tensors = [t.requires_grad_() for t in random_qkv(1, 2, 2, *seqlens, 64).values()]
        with use_isa(isa):
            out = sdpa(*tensors)
            return out, *torch.autograd.grad(out.square().sum(), tensors)

    amx = cpp.isa()
    for isa, *seqlens in (
        ("avx512", 256, 256), (amx, 257, 257), ("avx512", 128, 400), (amx, 129, 400),
    ):  # fmt: skip
        assert all(map(torch.equal, run("", *seqlens), run(isa, *seqlens))), seqlens


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00001, -1], ids=hex)
def test_every_nan_remains_nan(bits, isa):
    query, key, value = draw_qkv(40, 40)
    key.view(torch.int32)[0, 0, 7, 3] = bits
    out, lse = sdpa(query, key, value, return_lse=True)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FFF8000], ids=hex)
@pytest.mark.parametrize("seqlen_q", [4, 40])
def test_nan_of_a_wider_type_remains(seqlen_q, bits, isa):
    """Rounding to bfloat16 does not turn the NaN of a float32 bias or dlse into a number."""
    tensors = [t.requires_grad_() for t in draw_qkv(seqlen_q, 64, torch.bfloat16)]
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    bias = torch.zeros(seqlen_q, 64)
    bias[1, 7] = nan
    out, lse = sdpa(*tensors, bias, return_lse=True)
    assert out[0, 0, 1].isnan().all() and lse[0, 0, 1].isnan()
    assert out[0, 0, 2:].isfinite().all()
    _, lse = sdpa(*tensors, return_lse=True)
    grad_query, _ = torch.autograd.grad(lse, tensors[:2], nan.expand_as(lse))
    assert grad_query.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_dropped_nan_values_do_not_spread(dtype, isa):
    """A NaN value reaches only the rows whose dropout keeps it, with few and with many queries."""
    query, key, value = draw_qkv(40, 200, dtype, head_dim=64)
    call = functools.partial(sdpa, dropout_p=0.5, seed=3)
    kept = call(query, key, torch.eye(200, dtype=dtype)[None, None])[0, 0, :, 7] > 0
    value[0, 0, 7] = torch.nan
    for n in (4, 40):
        assert torch.equal(call(query[:, :, :n], key, value)[0, 0].isnan().all(-1), kept[:n])


@pytest.mark.parametrize("seqlen_q", [4, 40])
def test_tiny_scales(seqlen_q, isa):
    """Weights are equal with a tiny scale, although lse / scale is infinite in float32."""
    query, key, value = (t.requires_grad_() for t in draw_qkv(seqlen_q, 128))
    out = sdpa(query, key, value, scale=1.2e-38)
    (grad_value,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(grad_value, torch.full_like(value, seqlen_q / 128))


def test_head_dim_0(isa):
    """With head_dim 0, all keys have the same weight."""
    tensors = [torch.zeros(1, 2, n, 0, requires_grad=True) for n in (40, 8, 8)]
    out, lse = sdpa(*tensors, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)))
    grads = torch.autograd.grad(out.sum() + lse.sum(), tensors)
    assert [grad.shape for grad in grads] == [x.shape for x in tensors]


@pytest.mark.parametrize("biased", [False, True], ids=["full", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_padding_rows_of_query_tiles_add_no_gradient(dtype, biased, isa):
    """Gradients of an infinite key are finite: padding rows of a query tile add no 0 * inf."""
    query, key, value = (t.requires_grad_() for t in draw_qkv(33, 4, dtype))
    key.data[0, 0, 1, 2] = torch.inf
    bias = torch.zeros(1, 1, 33, 4) if biased else None
    out = sdpa(query, key, value, bias, softcap=3.0)
    out.sum().backward()
    assert all(t.isfinite().all() for t in (out, key.grad, value.grad))


def assert_same_bits_on_threads(run):
    """Assert that run() returns bitwise identical results with 1, 2 and 5 threads."""
    results = []
    for number in (1, 2, 5):
        with use_threads(number):
            results.append(run())
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_threads_do_not_change_gradients(dtype, isa):
    """Gradients, even of a broadcast bias, are bitwise identical with 1, 2 and 5 threads."""
    leaves = [t.to(dtype).requires_grad_() for t in random_qkv(2, 4, 2, 300, 300, 48).values()]
    leaves.append(torch.randn(1, 4, 300, 300, generator=drawn(6)).requires_grad_())

    def run():
        out, lse = sdpa(*leaves, 0.2, enable_gqa=True, return_lse=True, seed=1)
        return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)

    assert_same_bits_on_threads(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("seqlen_k", "dropout_p"), [(500, 0.0), (3, 0.4)])
def test_threads_do_not_change_inference(seqlen_k, dropout_p, dtype, isa):
    """Inference is bitwise identical with 1, 2 and 5 threads, even with a NaN in value."""
    tensors = random_qkv(1, 2, 1, 520, seqlen_k, 32)
    tensors["value"] *= 2.0 ** (torch.arange(seqlen_k)[:, None] // 64 % 4 * 3)
    tensors["value"][0, 0, seqlen_k // 2, 5] = torch.nan
    inputs = [t.to(dtype) for t in tensors.values()]
    options = {"is_causal": True, "enable_gqa": True, "dropout_p": dropout_p, "seed": 1}
    assert_same_bits_on_threads(lambda: [sdpa(*inputs, **options)])
