"""Float masks: their gradients, and very negative biases."""

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    ONE_16_BIT_TYPE,
    assert_like_eager,
    attention,
    drawn,
    leaves_of,
    random_qkv,
    short,
    use_threads,
)

from fused_attn import functional as F
from fused_attn import masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=short)
@pytest.mark.parametrize("lowest", [-1e6, -1e8, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_whose_bias_is_very_negative(backend, lowest, dtype):
    """A finite bias masks no key, however negative it is."""
    bias = torch.zeros(9, 70)
    bias[2:5] = lowest
    tensors = random_qkv(1, 2, 2, 9, 70, 16)
    assert_like_eager(attention(masks.bias(bias)), tensors, dtype, backend)


@ONE_16_BIT_TYPE
@pytest.mark.sampled("covered by False", dtype=[torch.float32, torch.float64], own_dtype=[True])
@pytest.mark.thinned("covered by True", dtype=[torch.bfloat16], own_dtype=[False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("own_dtype", [False, True], ids=["bias_f32", "bias_same"])
@pytest.mark.parametrize(
    "shape", [(2, 4, 45, 150), (4, 45, 150), (2, 1, 45, 150), (45, 150), (2, 1, 1, 150),
              (1, 4, 45, 1), (1, 1, 1, 1), (4, 1, 150)], ids=str,
)  # fmt: skip
def test_bias_gradient(shape, own_dtype, dtype, backend):
    tensors = random_qkv(2, 4, 2, 45, 150, 32)
    bias = torch.randn(shape, generator=drawn(1))
    half = dtype in (torch.float16, torch.bfloat16)
    tensors["bias"] = bias.to(dtype) if own_dtype and half else bias
    assert_like_eager(attention(masks.causal(), enable_gqa=True), tensors, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("shape", [(16, 45, 150), (8, 1, 45, 150), (8, 16, 45, 150)], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.2, "seed": 5}], ids=str)
def test_bias_gradient_does_not_depend_on_threads(options, shape, dtype, isa):
    """Bias gradients are bitwise identical with 1 thread and with more threads than tasks.

    With idle threads, a second pass sums the gradient instead of the backward.
    """
    tensors = random_qkv(8 if len(shape) == 4 else 2, 16, 8, 45, 150, 16)
    tensors["bias"] = torch.randn(shape, generator=drawn(2))
    call = attention(masks.causal(), enable_gqa=True, **options)
    assert_like_eager(call, tensors, dtype, "cpp")

    def gradients(threads):
        leaves = leaves_of(tensors.values(), dtype, "cpp")
        with use_threads(threads):
            out, _ = call("cpp")(*leaves)
            return torch.autograd.grad(out.square().sum(), leaves)

    for few, many in zip(gradients(1), gradients(65), strict=True):
        assert torch.equal(few, many)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_bias_gradient_reaches_an_expanded_mask(dtype, backend):
    """The gradient of an expanded bias is summed over the expanded dimensions."""
    tensors = random_qkv(2, 4, 4, 20, 30, 16)
    tensors["bias"] = torch.randn(20, 30)

    def expanded(backend):
        def call(query, key, value, bias):
            mask = bias.expand(2, 4, 20, 30)
            return F.scaled_dot_product_attention(
                query, key, value, mask, return_lse=True, backend=backend
            )

        return call

    assert_like_eager(expanded, tensors, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_gradients_of_a_float_mask_add_up_over_the_keys(dtype, backend):
    """The gradient of a bias that is constant over the keys is within the numerics contract.

    It equals the gradient of lse, because all other terms cancel. If delta were computed from the
    output rounded to 16 bits, they would not cancel.
    """
    base = masks.bias(torch.randn(60, 150, generator=drawn(2)))
    tensors = random_qkv(2, 2, 2, 60, 150, 32)
    tensors["bias"] = torch.randn(60, 1, generator=drawn(3))
    assert_like_eager(attention(base), tensors, dtype, backend)
