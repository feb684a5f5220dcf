"""A few queries against many keys without gradients: the decode kernel."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, ISAS, assert_outputs_like_eager, attention, random_qkv, runnable, short
from mask_cases import MASKS

from fused_attn import functional as F
from fused_attn import masks, philox
from fused_attn.backends import cpp, reference
from fused_attn.mask_spec import normalize


def check(tensors, mask, dtype, **options):
    """out and lse of a call without gradients, within the contract."""
    assert_outputs_like_eager(attention(mask, enable_gqa=True, **options), tensors, dtype, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("seqlen_q", [1, 3, 16])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, seqlen_q, dtype):
    shape = (2, 4, 2, seqlen_q, 300)
    check(random_qkv(*shape, 40, 24), MASKS[name](2, 4, seqlen_q, 300), dtype)


def test_is_another_kernel():
    """Rounded in another order than where a backward follows, or this file tests nothing."""
    tensors = random_qkv(1, 4, 4, 1, 2000, 64)
    q, k, v = (tensors[n].float() for n in ("query", "key", "value"))
    args = (q, k, v, normalize(masks.as_mask(None, False), 1, 4, 1, 2000, q), 0.3, 0.0, 0.0, None)
    outs = [cpp.attention_fwd(*args, for_backward=flag)[0] for flag in (True, False)]
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_isas(isa, dtype):
    if not runnable(isa):
        pytest.skip(f"reason: this CPU has no {isa}")
    with cpp.use_isa(isa):
        check(random_qkv(1, 8, 1, 2, 1000, 64), masks.causal(align="bottom_right"), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_softcap_scale_and_single_head(dtype):
    check(random_qkv(1, 1, 1, 1, 5000, 128), None, dtype, softcap=5.0, scale=0.3)
    check(random_qkv(1, 1, 1, 2, 700, 5), None, dtype, scale=-0.3)


def test_dropout_is_that_of_the_reference():
    tensors = random_qkv(2, 4, 2, 5, 333, 16)
    q, k, v = (tensors[n].float() for n in ("query", "key", "value"))
    seed = philox.new_seed(q.device)
    spec = normalize(masks.padding([333, 100]), 2, 4, 5, 333, q)
    args = (q, k, v, spec, 0.25, 0.0, 0.4, seed)
    got = cpp.attention_fwd(*args, for_backward=False)[0]
    torch.testing.assert_close(got, reference.attention(*args)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_invisible_nan_stays_where_it_is(dtype):
    tensors = random_qkv(2, 2, 2, 3, 400, 32)
    for name in ("key", "value"):
        tensors[name][0, :, 300:] = float("nan")
        tensors[name][1, :, 7] = float("inf")
    seen = torch.ones(2, 1, 3, 400, dtype=torch.bool)
    seen[0, :, :, 300:] = False
    seen[1, :, 1:, 7] = False
    x = [tensors[n].to(dtype) for n in ("query", "key", "value")]
    out = F.scaled_dot_product_attention(*x, seen, backend="cpp")
    assert out[0].isfinite().all()
    assert out[1, :, 1:].isfinite().all()
    assert not out[1, :, 0].isfinite().any()
