"""Calls without gradients, which run on separate kernels on some instruction sets."""

from __future__ import annotations

import pytest
import torch
from helpers import ISAS, assert_contract, assert_outputs_like_eager, attention, random_qkv, short
from mask_cases import MASKS, OTHER_MASKS

from fused_attn import functional as F
from fused_attn import masks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# All instruction sets with AMX tiles, and two without.
TILE_ISAS = [*(isa for isa in ISAS if isa.startswith("amx")), "avx512_bf16", "avx2"]
pytestmark = pytest.mark.parametrize("isa", TILE_ISAS, indirect=True)


def without_lse(mask=None, **options):
    """Return function(backend)(query, key, value), which computes out but not lse."""

    def of(backend):
        named = options if backend == "cpp" else {**options, "backend": backend}

        def call(query, key, value):
            return (F.scaled_dot_product_attention(query, key, value, mask, **named),)

        return call

    return of


def check(tensors, dtype, mask=None, **options):
    """Assert that results with and without lse are within the numerics contract."""
    for function in (without_lse, attention):
        assert_outputs_like_eager(function(mask, **options), tensors, dtype, "cpp")


@OTHER_MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype, isa):
    tensors = random_qkv(3, 4, 2, 45, 149, 36, 20)
    check(tensors, dtype, MASKS[name](3, 4, 45, 149), enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_options(dtype, isa):
    tensors = random_qkv(2, 2, 2, 70, 139, 40)
    bias = masks.bias(torch.randn(2, 70, 139))
    check(tensors, dtype, bias, softcap=2.0)
    check(tensors, dtype, masks.causal(), dropout_p=0.3)
    check(tensors, dtype, scale=-0.5)
    check(tensors, dtype, scale=0.0)


@pytest.mark.parametrize("head_dim", [1, 8, 32, 96, 128, 160, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_head_dims(dtype, head_dim, isa):
    check(random_qkv(1, 2, 1, 40, 130, head_dim, 257 - head_dim), dtype, enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_a_maximum_that_rises(dtype, isa):
    """Results are within the numerics contract if each KV block raises the row maximum."""
    tensors = random_qkv(1, 2, 2, 64, 400, 32)
    tensors["key"] *= torch.arange(400)[:, None] // 64 * 8.0
    check(tensors, dtype)
    check(tensors, dtype, masks.causal())


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scores_far_below(dtype, isa):
    """Results are within the numerics contract if keys have a bias of finfo.min or are masked."""
    tensors = random_qkv(1, 2, 2, 64, 200, 32)
    lowest = torch.finfo(torch.float32).min
    visible = torch.rand(64, 200) > 0.5
    visible[:32, :64] = False
    visible[5] = False
    check(tensors, dtype, masks.bias(torch.zeros(64, 200).masked_fill(~visible, lowest)))
    check(tensors, dtype, masks.dense(visible))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_more_keys_than_are_packed_at_once(dtype, isa):
    tensors = random_qkv(1, 2, 1, 70, 4300, 128)
    check(tensors, dtype, masks.sliding_window(4200, 0, align="bottom_right"), enable_gqa=True)


POWERS = {
    "queries": {"query": torch.arange(70) % 9 * 20 - 80},
    "keys": {"query": -60, "key": torch.arange(139) % 7 * 20 - 60},
    "small keys": {"query": 100, "key": -120 + torch.arange(139) % 3 * 10},
    "subnormal keys": {"query": 124, "key": -135},
    "values": {"value": torch.arange(139) // 16 % 5 * 3},
    "small values": {"value": -100},
    "large values": {"value": 120},
    "subnormal values": {"value": -140},
    "blocks of values": {"value": torch.arange(139) // 64 * 40 - 60},
}


@pytest.mark.parametrize("name", POWERS)
def test_powers_of_2(name, isa):
    """Float32 results are within the numerics contract for very small and very large operands."""
    if isa.startswith("amx") and name.startswith("subnormal"):
        pytest.skip("reason: AMX treats bfloat16 subnormals as 0")
    tensors = random_qkv(1, 2, 2, 70, 139, 32)
    for tensor, powers in POWERS[name].items():
        powers = torch.as_tensor(powers, dtype=torch.float64).view(-1, 1)
        tensors[tensor] = (tensors[tensor].double() * 2.0**powers).float()
    inputs = [*tensors.values()]
    truth = without_lse()("eager")(*(t.double() for t in inputs))[0]
    eager, got = (without_lse()(backend)(*inputs)[0] for backend in ("eager", "cpp"))
    # Check the queries of each power separately, because large errors would hide small ones.
    period = 9 if name == "queries" else 1
    for i in range(period):
        some = slice(i, None, period)
        assert_contract("out", got[:, :, some], truth[:, :, some], eager[:, :, some])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 3e38, 1e-30])
def test_fully_masked_keys_do_not_matter(hidden, dtype, isa):
    """Fully masked keys and values affect no output, even if they are NaN, huge or tiny."""
    query, *rest = (t.to(dtype) for t in random_qkv(2, 2, 2, 70, 139, 32).values())
    hide = (torch.arange(139) >= torch.tensor([[75], [139]]))[:, None, :, None]
    hidden = hidden if hidden == float("inf") else min(hidden, torch.finfo(dtype).max)
    dirty, clean = ([query, *(t.masked_fill(hide, x) for t in rest)] for x in (hidden, 0.0))
    for mask in (masks.padding([75, 139]), masks.dense(~hide.mT.expand(2, 1, 70, 139))):
        got = F.scaled_dot_product_attention(*dirty, mask)
        truth = without_lse(mask)("eager")(*(t.double() for t in clean))[0]
        assert_contract("out", got, truth, without_lse(mask)("eager")(*clean)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_an_infinite_value_reaches_the_queries_that_attend_to_it(dtype, isa):
    query, key, value = (t.to(dtype) for t in random_qkv(1, 1, 1, 70, 139, 32).values())
    value[0, 0, 66, 3] = float("inf")
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.isinf(out[0, 0, 66:, 3]).all()
    assert torch.isfinite(out[0, 0, :66]).all()
    assert torch.isfinite(out[..., 4:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("name", "row"), [("query", 5), ("key", 3), ("key", 130)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_visible_nan_of_either_sign_is_seen(sign, name, row, dtype, isa):
    """A visible NaN of either sign reaches the output; on x86, 0 * inf is a negative NaN."""
    tensors = {n: t.to(dtype) for n, t in random_qkv(1, 1, 1, 70, 139, 32).items()}
    element = tensors[name][0, 0, row, 3:4].fill_(float("nan"))
    bits = element.view(torch.int32 if dtype == torch.float32 else torch.int16)
    sign_bit = torch.iinfo(bits.dtype).min
    bits.copy_(bits & ~sign_bit if sign > 0 else bits | sign_bit)
    for function in (without_lse(), attention()):
        nan = function("cpp")(*tensors.values())[0][0, 0].isnan()
        assert nan[row if name == "query" else slice(None)].all()
        assert name == "key" or nan.sum() == nan[row].sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("size", [3e2, 1e4, 1e6, 1e15, 1e18])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_scores_far_apart(mask, size, dtype, isa):
    """Results are within the numerics contract if scores are far outside the range of exp."""
    if size > torch.finfo(dtype).max / 10:
        pytest.skip("reason: outside the range of float16")
    tensors = random_qkv(1, 2, 2, 70, 139, 32)
    tensors["query"] *= size
    check(tensors, dtype, mask and masks.causal())


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("scale", [1e-46, 1e-30, 1e-7, 1e-5, 1e-2])
def test_scores_that_are_nearly_the_same(scale, dtype, isa):
    """Results are within the numerics contract for tiny scales, even one that is 0 in float32."""
    check(random_qkv(1, 2, 2, 70, 139, 32), dtype, masks.causal(), scale=scale)


def test_results_below_the_normal_numbers(isa):
    """Subnormal bfloat16 outputs are not flushed to 0."""
    if isa.startswith("amx"):
        pytest.skip("reason: AMX treats bfloat16 subnormals as 0")
    query, key, value = (torch.zeros(1, 1, 139, 64, dtype=torch.bfloat16) for _ in range(3))
    value[0, 0, :3] = 1.5 * 2.0**-126
    out = F.scaled_dot_product_attention(query, key, value)
    assert ((out.double() - 4.5 / 139 * 2.0**-126).abs() <= 2.0**-134).all()
