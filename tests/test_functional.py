"""Shapes and broadcasts as in torch, and the choice of a backend."""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS

import fused_attn
from fused_attn import functional as F

SHAPES = {  # query, key, value
    "2d": ((5, 8), (7, 8), (7, 6)),
    "3d": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "5d": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "batch_of_key_broadcasts": ((3, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    "batch_of_query_broadcasts": ((1, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 8)),
    "heads_of_key_broadcast": ((3, 4, 5, 8), (3, 1, 7, 8), (3, 1, 7, 8)),
    "heads_of_query_broadcast": ((3, 1, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)),
    "heads_of_value_alone": ((3, 4, 5, 8), (3, 1, 7, 8), (3, 4, 7, 8)),
    "dimensions_differ": ((4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_as_in_torch(name, backend):
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES[name]]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    for mask in (None, torch.rand(5, 7) < 0.8, torch.randn(5, 7, dtype=torch.float64)):
        if mask is not None and mask.dtype == torch.bool:
            mask[:, 0] = True
        got = F.scaled_dot_product_attention(*ours, mask, backend=backend)
        want = torch.nn.functional.scaled_dot_product_attention(*theirs, mask)
        torch.testing.assert_close(got, want)
        grad = torch.randn_like(want)
        for one, two in zip(
            torch.autograd.grad(got, ours, grad),
            torch.autograd.grad(want, theirs, grad),
            strict=True,
        ):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_mask_shapes_as_in_torch(backend):
    for shape, mask_shapes in (
        ((3, 5, 8), [(3, 5, 5), (1, 5, 5), (5,), (3, 1, 5)]),
        ((2, 3, 4, 5, 8), [(2, 3, 4, 5, 5), (3, 4, 5, 5), (2, 1, 1, 1, 5), (4, 5, 5)]),
    ):
        x = torch.randn(shape, dtype=torch.float64)
        for mask_shape in mask_shapes:
            mask = torch.randn(mask_shape, dtype=torch.float64)
            got, lse = F.scaled_dot_product_attention(
                x, x, x, mask, return_lse=True, backend=backend
            )
            want = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
            torch.testing.assert_close(got, want)
            assert lse.shape == want.shape[:-1]


def test_choice_of_backend(monkeypatch):
    x = torch.randn(1, 1, 200, 64)
    assert fused_attn.available_backends() == ("cpp", "eager")
    cpp = F.scaled_dot_product_attention(x, x, x, backend="cpp")
    eager = F.scaled_dot_product_attention(x, x, x, backend="eager")
    assert not torch.equal(cpp, eager)  # so that the results tell who computed
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), cpp)
    with fused_attn.use_backend("eager"):
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), eager)
        with fused_attn.use_backend("cpp"):
            assert torch.equal(F.scaled_dot_product_attention(x, x, x), cpp)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, backend="cpp"), cpp)
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "eager")
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), eager)
    with fused_attn.use_backend("cpp"):
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), cpp)
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="backend must be one of"):
        F.scaled_dot_product_attention(x, x, x)


def test_cpu_isa_variable():
    """Checked in a process of its own: the choice is made once."""
    import subprocess
    import sys

    def isa(value):
        return subprocess.run(
            [sys.executable, "-c", "from fused_attn.backends import cpp; print(cpp.isa())"],
            capture_output=True, text=True, env={"FUSED_ATTN_CPU_ISA": value},
        )  # fmt: skip

    assert isa("generic").stdout.strip() == "generic"
    refused = isa("sse9")
    assert refused.returncode != 0
    assert "FUSED_ATTN_CPU_ISA must be one of" in refused.stderr
