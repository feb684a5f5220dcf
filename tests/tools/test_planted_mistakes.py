"""A correct kernel is within the contract, and a kernel with a planted mistake is not."""

import pytest
import torch
from helpers import compare_with_eager, random_qkv, short
from tiled_attention import MISTAKES, Options, TiledAttention

from fused_attn import functional as F
from fused_attn import masks


def tensors_of(problem):
    if problem == "few_keys":
        return random_qkv(1, 2, 2, 2, 2, 256, seed=10) | {"bias": torch.zeros(1, 2, 2, 2)}
    bias = torch.randn(2, 2, 50, 70, generator=torch.Generator().manual_seed(3))
    if problem == "plain":
        return random_qkv(2, 2, 2, 50, 70, 32) | {"bias": bias}
    # Whole numbers: scores are exact, and lse is large.
    tensors = {n: t.mul(2).round() for n, t in random_qkv(2, 2, 2, 50, 70, 16).items()}
    tensors["key"][..., 0] = tensors["query"][..., 0] = 64.0
    return tensors | {"bias": bias.round()}


def findings(problem, dtype, mistake=""):
    """Return contract findings for out, lse and all gradients of the tiled kernel.

    For "few_keys", lse is omitted, because its gradient would dominate the gradient of the scores.
    """
    results = 1 if problem == "few_keys" else 2
    dropout_p = 0.3 if problem == "plain" else 0.0
    scale = {"plain": 32**-0.5, "few_keys": 0.0625, "whole_numbers": 0.25}[problem]
    seed = torch.tensor(11)
    options = Options(scale, dropout_p, seed, mistake)

    def function(backend):
        def call(query, key, value, bias):
            if backend != "eager":
                return TiledAttention.apply(query, key, value, bias, options)[:results]
            mask = masks.causal(align="bottom_right") & masks.bias(bias)
            return F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, scale=scale, seed=seed, return_lse=True,
                backend="eager",
            )[:results]  # fmt: skip

        return call

    return compare_with_eager(function, tensors_of(problem), dtype, "cpp")[1]


# Problems and dtypes in which rounding does not hide these mistakes.
VISIBLE_IN = {
    "scale": [("plain", torch.float32)],
    "weights": [("plain", torch.float32)],
    "lse_residual": [("whole_numbers", torch.float32)],
    "delta": [("few_keys", torch.bfloat16), ("few_keys", torch.float16)],
}
EVERYWHERE = [("plain", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
CASES = [(m, *where) for m in MISTAKES for where in VISIBLE_IN.get(m, EVERYWHERE)]


@pytest.mark.sampled("covered by bfloat16", dtype=[torch.float16])
@pytest.mark.parametrize(("mistake", "problem", "dtype"), CASES, ids=lambda v: str(v)[-8:])
def test_a_mistake_violates_the_contract(mistake, problem, dtype):
    assert not all(f.ok for f in findings(problem, dtype, mistake)), MISTAKES[mistake]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("problem", ["plain", "few_keys", "whole_numbers"])
def test_a_correct_kernel_satisfies_the_contract(problem, dtype):
    for finding in findings(problem, dtype):
        assert finding.ok, str(finding)
