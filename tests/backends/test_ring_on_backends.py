"""Ring attention on each backend, in one process, with permuted rows."""

import pytest
import torch
from helpers import BACKENDS, assert_like_eager, device_of, drawn, random_qkv

import fused_attn
from fused_attn import masks
from fused_attn.distributed import Sharding, ring_attention

LENGTH = 70
SHARDING = Sharding([[range(32, LENGTH), range(32)]])  # two ranges of rows, so four blocks
MASKS = {
    "window": masks.sliding_window(20, 3),
    "documents": masks.causal() & masks.documents(torch.arange(LENGTH) // 25),
    "padding": masks.padding(torch.tensor([50])) & masks.alibi(torch.tensor([0.5, 0.1])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_ring(backend, name, dtype, one_process):
    """Ring attention over permuted rows matches full attention, with dropout and a learned bias."""
    if backend != "eager" and device_of(backend).type == "cuda":
        pytest.skip("reason: gloo does not exchange GPU tensors")

    def of(named):
        def full(query, key, value, bias):
            mask = MASKS[name] & masks.bias(bias)
            options = {"dropout_p": 0.25, "seed": 3, "return_lse": True}
            return fused_attn.scaled_dot_product_attention(
                query, key, value, mask, backend="eager", **options
            )

        def ring(query, key, value, bias):
            order = SHARDING.positions(0)
            rows = [t[:, :, order] for t in (query, key, value)]
            with fused_attn.use_backend(backend):
                out, lse = ring_attention(
                    *rows, MASKS[name] & masks.bias(bias), positions=SHARDING, dropout_p=0.25,
                    seed=3, return_lse=True,
                )  # fmt: skip
            return out[:, :, order.argsort()], lse[:, :, order.argsort()]

        return full if named == "eager" else ring

    tensors = random_qkv(1, 2, 2, LENGTH, LENGTH, 32)
    bias = torch.randn(LENGTH, LENGTH, generator=drawn(1))
    assert_like_eager(of, {**tensors, "bias": bias}, dtype, "cpp")
