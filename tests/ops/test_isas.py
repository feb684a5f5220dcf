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

from fused_attn import functional, masks
from fused_attn.backends import cpp, get_backend
from fused_attn.call.norm import NormCall, NormOptions


@OTHER_MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_attention(name, dtype, isa):
    """Attention with every mask is within the numerics contract.

    There are 75 queries, because float32 calls with at most 64 queries do not run on AMX.
    """
    mask = MASKS[name](3, 4, 75, 149)
    tensors = random_qkv(3, 4, 2, 75, 149, 36, 20)
    assert_like_eager(attention(mask, enable_gqa=True), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows_an_odd_number_apart(dtype, isa):
    """Results for rows with an odd stride are bitwise identical to those for contiguous rows."""
    generator = drawn(0)
    wide = [torch.randn(1, 2, 64, 65, generator=generator, dtype=dtype) for _ in range(3)]
    results = []
    for tensors in ([x[..., :64] for x in wide], [x[..., :64].contiguous() for x in wide]):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = functional.scaled_dot_product_attention(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for strided, packed in zip(*results, strict=True):
        assert torch.equal(strided, packed)


def test_sums_over_keys(isa):
    """Sums of a few large and many small weights are within the numerics contract."""
    shape = 2, 2, 1, 70, 139
    slopes = 2.0 ** (-4.0 * torch.arange(1.0, 3.0))
    mask = masks.sliding_window(27, 15) & masks.alibi(slopes)
    tensors = random_qkv(*shape, 16)
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


def test_float16_conversions_are_those_of_the_processor(isa):
    """Conversions to and from 16-bit types round as torch's do, and preserve infinity and NaN."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every[torch.isfinite(every)].reshape(-1, 1)
    zero = torch.zeros_like(x)
    kept = total_of(x, zero)
    assert torch.equal(kept, x + zero)
    for dtype in (torch.float16, torch.bfloat16):
        odd = torch.tensor([[float("inf")], [float("-inf")], [float("nan")]], dtype=dtype)
        total = total_of(odd, torch.zeros_like(odd))
        assert torch.equal(total[:2], odd[:2]) and total[2].isnan().all()
    # Sums that are rounded to even, overflow or underflow.
    big = torch.randn(4096, 1, generator=drawn(0)) * 3e4
    for dtype in (torch.float16, torch.bfloat16):
        a, b = big.to(dtype), big.flip(0).to(dtype) * 2**-7
        total = total_of(a, b)
        want = (a.float() + b.float()).to(dtype)
        torch.testing.assert_close(total, want, rtol=0.0, atol=0.0, equal_nan=True)


def test_scores_of_float16_are_those_of_float32(isa):
    """Scores of float16 inputs have float32 accuracy, as the lse of a single key shows."""
    query, key = (torch.randn(2, 64, 8, 1, 40, generator=drawn(0))).half()
    _, lse = functional.scaled_dot_product_attention(query, key, key, return_lse=True)
    terms = query.double() * key.double() * 40**-0.5
    truth = terms.sum(-1)
    # Relative errors reach 2^-22 for float32 sums of 40 terms; with 17-bit operands, 2^-17.
    assert ((lse - truth).abs() <= 2.0**-21 * (terms.norm(dim=-1) + truth.abs())).all()


def test_small_float32_calls_run_on_avx512():
    """Small float32 calls run on AVX-512 instead of AMX, forward and backward."""
    if not cpp.isa().startswith("amx"):
        pytest.skip("reason: AMX is not the default here")

    def run(isa, seqlen_q, seqlen_k):
        sizes = 1, 2, 2, seqlen_q, seqlen_k, 64
        tensors = [t.requires_grad_() for t in random_qkv(*sizes).values()]
        with use_isa(isa):
            out = functional.scaled_dot_product_attention(*tensors)
            return out, *torch.autograd.grad(out.square().sum(), tensors)

    on_amx = cpp.isa()
    for isa, *size in (
        ("avx512", 256, 256),
        (on_amx, 257, 257),
        ("avx512", 128, 400),
        (on_amx, 129, 400),
    ):
        for a, b in zip(run("", *size), run(isa, *size), strict=True):
            assert torch.equal(a, b), size


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00001, -1], ids=hex)
def test_nan_remains_nan_whatever_its_bits(bits, isa):
    query, key, value = (torch.randn(1, 1, 40, 32, generator=drawn(2)) for _ in range(3))
    key.view(torch.int32)[0, 0, 7, 3] = bits
    out, lse = functional.scaled_dot_product_attention(query, key, value, return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FFF8000], ids=hex)
@pytest.mark.parametrize("seqlen_q", [4, 40])
def test_nan_of_a_wider_type_remains(seqlen_q, bits, isa):
    """Rounding to bfloat16 does not turn the NaN of a float32 bias or dlse into a number."""
    tensors = [
        torch.randn(1, 1, n, 32, generator=drawn(2)).bfloat16().requires_grad_()
        for n in (seqlen_q, 64, 64)
    ]
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    bias = torch.zeros(seqlen_q, 64)
    bias[1, 7] = nan
    out, lse = functional.scaled_dot_product_attention(*tensors, bias, return_lse=True)
    assert out[0, 0, 1].isnan().all() and lse[0, 0, 1].isnan()
    assert out[0, 0, 2:].isfinite().all()
    _, lse = functional.scaled_dot_product_attention(*tensors, return_lse=True)
    grad_query, _ = torch.autograd.grad(lse, tensors[:2], nan.expand_as(lse))
    assert grad_query.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_dropped_nan_values_do_not_spread(dtype, isa):
    """A NaN value reaches only the rows whose dropout keeps it, with few and with many queries."""
    query, key, value = (
        torch.randn(1, 1, n, 64, generator=drawn(1)).to(dtype) for n in (40, 200, 200)
    )
    call = functools.partial(functional.scaled_dot_product_attention, dropout_p=0.5, seed=3)
    kept = call(query, key, torch.eye(200, dtype=dtype)[None, None])[0, 0, :, 7] > 0
    value[0, 0, 7] = torch.nan
    for n in (4, 40):
        assert torch.equal(call(query[:, :, :n], key, value)[0, 0].isnan().all(-1), kept[:n])


@pytest.mark.parametrize("seqlen_q", [4, 40])
def test_tiny_scales(seqlen_q, isa):
    """Weights are equal with a tiny scale, although lse / scale is infinite in float32."""
    query, key, value = (
        torch.randn(1, 1, n, 32, generator=drawn(1)).requires_grad_() for n in (seqlen_q, 128, 128)
    )
    out = functional.scaled_dot_product_attention(query, key, value, scale=1.2e-38)
    (grad_value,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(grad_value, torch.full_like(value, seqlen_q / 128))


def test_heads_without_features(isa):
    """With head_dim 0, all keys have the same weight."""
    query, key, value = (torch.zeros(1, 2, n, 0, requires_grad=True) for n in (40, 8, 8))
    out, lse = functional.scaled_dot_product_attention(query, key, value, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)))
    grads = torch.autograd.grad(out.sum() + lse.sum(), (query, key, value))
    assert [grad.shape for grad in grads] == [x.shape for x in (query, key, value)]


@pytest.mark.parametrize("biased", [False, True], ids=["full", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_rows_that_do_not_exist_have_no_gradient(dtype, biased, isa):
    """Gradients of an infinite key are finite: padding rows of a query tile add no 0 * inf."""
    query, key, value = (
        torch.randn(1, 1, n, 32, generator=drawn(3)).to(dtype).requires_grad_() for n in (33, 4, 4)
    )
    key.data[0, 0, 1, 2] = torch.inf
    bias = torch.zeros(1, 1, 33, 4) if biased else None
    out = functional.scaled_dot_product_attention(query, key, value, bias, softcap=3.0)
    out.sum().backward()
    assert out.isfinite().all()
    assert key.grad.isfinite().all()
    assert value.grad.isfinite().all()


def assert_same_bits_on_threads(run):
    """Assert that run() returns bitwise identical results with 1, 2 and 5 threads."""
    results = []
    for number in (1, 2, 5):
        with use_threads(number):
            results.append(run())
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_threads_do_not_change_gradients(dtype, isa):
    """Gradients, even of a broadcast bias, are bitwise identical with 1, 2 and 5 threads."""
    tensors = [t.to(dtype) for t in random_qkv(2, 4, 2, 300, 300, 48).values()]
    bias = torch.randn(1, 4, 300, 300, generator=drawn(6))

    def run():
        leaves = [t.clone().requires_grad_() for t in (*tensors, bias)]
        out, lse = functional.scaled_dot_product_attention(
            *leaves, 0.2, enable_gqa=True, return_lse=True, seed=1
        )
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
    assert_same_bits_on_threads(
        lambda: [functional.scaled_dot_product_attention(*inputs, **options)]
    )
