"""Gradients of the AMX kernels, which process 32 x 32 tiles and skip fully masked ones.

test_isas.py runs these kernels with every mask.
"""

from __future__ import annotations

import pytest
import torch
from helpers import ISAS, assert_like_eager, assert_outputs_like_eager, attention, random_qkv, short

from fused_attn import functional as F
from fused_attn import masks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
AMX = [isa for isa in ISAS if isa.startswith("amx")]
pytestmark = pytest.mark.parametrize("isa", AMX, indirect=True)


def checkered(queries: int, keys: int) -> torch.Tensor:
    """Return a random mask of 32 x 32 tiles, so that visible tiles have gaps between them."""
    generator = torch.Generator().manual_seed(3)
    tiles = torch.rand(-(-queries // 32), -(-keys // 32), generator=generator) < 0.5
    return tiles.repeat_interleave(32, 0).repeat_interleave(32, 1)[:queries, :keys]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.sliding_window(40, 10),
        masks.sliding_window(3, 3),
        masks.dense(checkered(700, 630)),
        masks.dense(torch.arange(700)[:, None] // 300 == torch.arange(630) // 300),
        masks.dense((torch.arange(700)[:, None] // 32 % 9 < 1) & (torch.arange(630) // 32 % 5 < 1)),
    ],
    ids=["none", "causal", "window", "diagonal", "checkered", "blocks", "seldom"],
)  # fmt: skip
def test_long(mask, dtype, isa):
    """Gradients are within the numerics contract if operands are packed in several steps."""
    assert_like_eager(attention(mask), random_qkv(1, 1, 1, 700, 630, 64), dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.padding([300, 2500]), masks.sliding_window(100, 1200)],
    ids=["causal", "padding", "window"],
)  # fmt: skip
def test_keys_that_do_not_fit(mask, dtype, isa):
    """Outputs are within the numerics contract if some of the steps that pack keys are masked."""
    tensors = random_qkv(2, 2, 1, 100, 2500, 128)
    assert_outputs_like_eager(attention(mask, enable_gqa=True), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_options(dtype, isa):
    tensors = random_qkv(2, 4, 2, 100, 139, 40)
    assert_like_eager(attention(softcap=2.0, enable_gqa=True), tensors, dtype, "cpp")
    options = {"dropout_p": 0.3, "enable_gqa": True}
    assert_like_eager(attention(masks.causal(), **options), tensors, dtype, "cpp")
    assert_like_eager(attention(scale=-0.5, enable_gqa=True), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "shape", [(8, 16, 70, 139), (1, 16, 70, 139), (8, 1, 70, 139), (1, 1, 70, 139), (70, 139),
              (8, 16, 1, 139), (8, 16, 70, 1)], ids=str,
)  # fmt: skip
def test_bias(shape, dtype, isa):
    """Bias gradients of all broadcast shapes are within the numerics contract."""
    tensors = random_qkv(8, 16, 8, 70, 139, 32)
    tensors["bias"] = torch.randn(shape)
    options = {"softcap": 3.0, "enable_gqa": True}
    assert_like_eager(attention(masks.causal(), **options), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "mask", [None, masks.dense(checkered(700, 330))], ids=["none", "checkered"]
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_bias_of_many_rows(dropout_p, mask, dtype, isa):
    """Bias gradients are within the numerics contract if query tiles are packed in steps."""
    tensors = random_qkv(1, 8, 8, 700, 330, 64)
    tensors["bias"] = torch.randn(8, 700, 330)
    assert_like_eager(attention(mask, dropout_p=dropout_p), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
@pytest.mark.parametrize("apart", [(0.0,), (0.0, 0.3), (0.0, 0.1, 0.2, 0.3, 0.4)])
def test_bias_of_keys_with_nearly_all_the_weight(apart, dtype, isa):
    """Bias gradients have errors below 1% of the largest one if few keys have nearly all weight.

    The rounding error of delta may then exceed dS.
    """
    tensors = random_qkv(1, 8, 8, 70, 130, 64)
    bias = torch.randn(8, 70, 130)
    for n, lower in enumerate(apart):  # these keys differ only by their bias
        at = 110 - 20 * n
        bias[:, :, at] = 24 - lower
        for name in ("key", "value"):
            tensors[name][:, :, at] = tensors[name][:, :, 110]
    bias = bias.to(dtype).float()
    gradients = []
    for backend, precision in (("eager", torch.float64), ("cpp", dtype)):
        leaf = bias.to(torch.promote_types(precision, torch.float32)).requires_grad_()
        query, key, value = (t.to(dtype).to(precision).requires_grad_() for t in tensors.values())
        out = F.scaled_dot_product_attention(query, key, value, masks.bias(leaf), backend=backend)
        gradients += torch.autograd.grad(out, leaf, torch.ones_like(out))
    truth, got = gradients
    assert (got - truth).abs().max() < 0.01 * truth.abs().max()


@pytest.mark.parametrize("power", [-12, -8, 8, 12])
def test_gradients_of_any_size(power, isa):
    """Scaling float16 output gradients by 2^-12 to 2^12 scales all gradients by this factor."""
    tensors = random_qkv(1, 2, 2, 96, 2000, 32)  # many keys, so all weights are small
    results = []
    for factor in (1.0, 2.0**power):
        leaves = [tensors[n].half().requires_grad_() for n in ("query", "key", "value")]
        out = F.scaled_dot_product_attention(*leaves, backend="cpp")
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
        out.backward(grad * factor if power > 0 else (grad.float() * factor).half())
        results.append([leaf.grad.float() / factor for leaf in leaves])
    for one, other in zip(*results, strict=True):
        # The spacing of float16 subnormals, divided by the loss scale if it is below 1.
        lost = 2.0 ** (-24 - min(power, 0))
        assert (one - other).abs().max() <= 2e-3 * one.abs().max() + lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=short)
def test_a_forward_is_the_same_with_gradients(dtype, isa):
    leaves = [t.to(dtype) for t in random_qkv(2, 4, 2, 70, 300, 48).values()]
    plain = F.scaled_dot_product_attention(*leaves, enable_gqa=True, backend="cpp")
    trained = [t.clone().requires_grad_() for t in leaves]
    out = F.scaled_dot_product_attention(*trained, enable_gqa=True, backend="cpp")
    assert out.requires_grad and torch.equal(out, plain)
