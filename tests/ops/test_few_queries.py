"""Outputs and gradients of the CPU kernels for few queries, which use no query tiles."""

from functools import partial

import pytest
import torch
from helpers import DTYPES, assert_like_eager, attention, drawn, random_qkv, short
from mask_cases import MASKS, OTHER_MASKS

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.nn.weights import attention_with_weights


@OTHER_MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype, isa):
    """Results are within the numerics contract if KV blocks and vectors are partial."""
    mask = MASKS[name](2, 4, 3, 149)
    tensors = random_qkv(2, 4, 2, 3, 149, 36, 20)
    assert_like_eager(attention(mask, enable_gqa=True), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8])
@pytest.mark.parametrize("seqlen_k", [1, 64, 700])
def test_sizes(seqlen_q, seqlen_k, dtype, isa):
    tensors = random_qkv(2, 3, 3, seqlen_q, seqlen_k, 64)
    assert_like_eager(attention(), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_a_block_that_only_the_last_queries_leave(dtype, isa):
    """Results are correct if the first 4 of 8 queries attend to an entire KV block."""
    tensors = random_qkv(1, 2, 2, 8, 190, 64)
    window = masks.sliding_window(121, 0, align="bottom_right")
    assert_like_eager(attention(window), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("options", [{"softcap": 4.0}, {"dropout_p": 0.3}], ids=str)
def test_bias_and_options(options, dtype, isa):
    tensors = random_qkv(2, 4, 2, 4, 149, 36, 20)
    tensors["bias"] = torch.randn(4, 4, 149, generator=drawn(1))
    assert_like_eager(attention(enable_gqa=True, **options), tensors, dtype, "cpp")


def peaked(seqlen_q, num_heads_kv):
    """Return query, key and value in which one key has nearly all the weight of each query."""
    tensors = random_qkv(2, 4, num_heads_kv, seqlen_q, 300, 64)
    group = tensors["query"].unflatten(1, (num_heads_kv, -1))
    tensors["key"][:, :, 77] = 3 * group.mean((2, 3))
    tensors["query"] = tensors["query"] * 8
    return tensors


def weighed(backend):
    """Return function(query, key, value) that returns the output and the attention weights."""
    return partial(attention_with_weights, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("seqlen_q", "num_heads_kv"), [(1, 1), (4, 1), (3, 4), (4, 4)])
def test_one_key_has_all_the_weight(seqlen_q, num_heads_kv, dtype, isa):
    """Results are within the numerics contract if one key has nearly all the weight.

    The kernels for few queries, for the bias gradient and for the weights must then recompute
    scores with the rounding of the forward.
    """
    tensors = peaked(seqlen_q, num_heads_kv)
    assert_like_eager(attention(enable_gqa=True), tensors, dtype, "cpp")
    # AMX rounds recomputed float32 scores differently (2^-17 here). On CPUs with AMX, calls as
    # short as these run on AVX-512 by default.
    if not (isa.startswith("amx") and dtype == torch.float32):
        assert_like_eager(weighed, tensors, dtype, "cpp")
    tensors["bias"] = torch.randn(seqlen_q, 300, generator=drawn(1))
    assert_like_eager(attention(enable_gqa=True), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_training_has_the_bits_of_inference(head_dim, dtype, isa):
    """The output for few queries is bitwise identical with and without gradients."""
    if "amx" in isa and dtype != torch.float64:
        pytest.skip("reason: with AMX, training uses query tiles")
    for seqlen_q in (1, 2, 4) if dtype == torch.bfloat16 else (1, 2, 4, 8):
        tensors = random_qkv(2, 4, 4, seqlen_q, 700, head_dim)
        q, k, v = (tensors[n].to(dtype) for n in ("query", "key", "value"))
        out = F.scaled_dot_product_attention(q, k, v)
        trained = F.scaled_dot_product_attention(q.requires_grad_(), k, v)
        assert torch.equal(out, trained)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("hidden", [slice(150, None), slice(70, 72)], ids=["end", "middle"])
def test_masked_keys_may_be_nan(hidden, dtype, isa):
    tensors = random_qkv(2, 2, 2, 3, 200, 64)
    leaves = [tensors[n].to(dtype).requires_grad_() for n in ("query", "key", "value")]
    bias = torch.zeros(3, 200, requires_grad=True)
    visible = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    visible[..., hidden] = False
    mask = masks.padding(torch.tensor([150, 99])) if hidden.stop is None else masks.dense(visible)
    results = []
    for junk in (0.0, float("nan")):
        with torch.no_grad():
            for x in leaves[1:]:
                x[:, :, hidden] = junk
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask & masks.bias(bias))
        results.append((out, *torch.autograd.grad(out.sum(), [*leaves, bias])))
    for clean, dirty in zip(*results, strict=True):
        if hidden.stop is None:
            assert torch.equal(clean, dirty)
        else:  # blocks with non-finite keys are summed in another order
            torch.testing.assert_close(dirty, clean)
