"""Gradients of rows with few visible keys, or with nearly all weight on one key.

`make fuzz` searches many more of these problems, in every dtype (tests/tools/test_fuzz.py).
"""

import pytest
import torch
from helpers import BACKENDS, device_of, drawn, random_qkv

from fused_attn import functional as F
from fused_attn.tools.checks import AttentionCheck

# Kernels that summed head_dim products sequentially exceeded the limits by up to a factor of 1.63.
FOUND_IN_FLOAT32 = [
    AttentionCheck(shape="2,2,17,17,128", mask="causal", seed=12),
    AttentionCheck(shape="2,2,17,17,128", mask="window:7", result="lse", seed=12),
    AttentionCheck(shape="2,2,17,17,128", mask="window:7", seed=11),
    AttentionCheck(shape="4,2/1,65,130,128", mask="window:7", seed=14),
    AttentionCheck(shape="2,4/2,21,37,16", mask="window:7", result="lse", seed=16),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", FOUND_IN_FLOAT32, ids=repr)
def test_found_in_float32(check, backend):
    for finding in check.run(backend, device_of(backend)):
        assert finding.ok, str(finding)


# Triton is left out, because its compiler chooses the summation order.
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("cpp", "cuda")])
@pytest.mark.parametrize("head_dim", [24, 96, 256])
def test_a_row_of_one_key_has_no_gradient_of_its_score(head_dim, backend):
    """A query that attends to one key has a gradient of 0, as dP and delta are bitwise equal."""
    shape = 2, 4, 2, 17, 17, head_dim
    query, key, value = (t.to(device_of(backend)) for t in random_qkv(*shape).values())
    query.requires_grad_()
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, backend=backend
    )
    out.backward(torch.randn(out.shape, generator=drawn(1)).to(out.device))
    assert query.grad[:, :, 0].eq(0).all() and query.grad[:, :, 1].ne(0).any()
