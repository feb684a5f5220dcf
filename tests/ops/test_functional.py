"""Shapes, broadcasting and scalar arguments as in torch, and the choice of a backend."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from helpers import BACKENDS, device_of, leaves_of, most_exact
from torch.utils.flop_counter import FlopCounterMode

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


@pytest.mark.thinned("these calls become 4-D before dispatch", name=[*SHAPES][4:])
@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_as_in_torch(name, backend):
    device, dtype = device_of(backend), most_exact(backend)
    tensors = [torch.randn(shape, dtype=dtype) for shape in SHAPES[name]]
    ours, theirs = leaves_of(tensors, dtype, backend), leaves_of(tensors, dtype, "eager")
    visible = torch.rand(5, 7) < 0.8
    visible[:, 0] = True
    for mask in (None, visible, torch.randn(5, 7, dtype=dtype)):
        want = torch.nn.functional.scaled_dot_product_attention(*theirs, mask)
        mask = None if mask is None else mask.to(device)
        got = F.scaled_dot_product_attention(*ours, mask, backend=backend)
        grad = torch.randn_like(want)
        got = got, *torch.autograd.grad(got, ours, grad.to(device))
        want = want, *torch.autograd.grad(want, theirs, grad)
        torch.testing.assert_close([t.cpu() for t in got], [*want])


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_mask_shapes_as_in_torch(backend):
    device, dtype = device_of(backend), most_exact(backend)
    for shape, mask_shapes in (
        ((3, 5, 8), [(3, 5, 5), (1, 5, 5), (5,), (3, 1, 5)]),
        ((2, 3, 4, 5, 8), [(2, 3, 4, 5, 5), (3, 4, 5, 5), (2, 1, 1, 1, 5), (4, 5, 5)]),
    ):
        x = torch.randn(shape, dtype=dtype)
        y = x.to(device)
        for mask_shape in mask_shapes:
            mask = torch.randn(mask_shape, dtype=dtype)
            got, lse = F.scaled_dot_product_attention(
                y, y, y, mask.to(device), return_lse=True, backend=backend
            )
            want = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
            torch.testing.assert_close(got.cpu(), want)
            assert lse.shape == want.shape[:-1]


def test_choice_of_backend(monkeypatch):
    x = torch.randn(1, 1, 200, 64)
    available = fused_attn.available_backends()
    assert available[0] == "cpp" and available[-1] == "eager"
    attend = partial(F.scaled_dot_product_attention, x, x, x)
    cpp, eager = attend(backend="cpp"), attend(backend="eager")
    assert not torch.equal(cpp, eager)  # so that the results identify the backend
    assert torch.equal(attend(), cpp)
    with fused_attn.use_backend("eager"):
        assert torch.equal(attend(), eager)
        with fused_attn.use_backend("cpp"):
            assert torch.equal(attend(), cpp)
        assert torch.equal(attend(backend="cpp"), cpp)
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "eager")
    assert torch.equal(attend(), eager)
    with fused_attn.use_backend("cpp"):
        assert torch.equal(attend(), cpp)


def test_cpu_isa_variable():
    """FUSED_ATTN_CPU_ISA selects an instruction set; test_cli.py tests an invalid value."""
    code = "from fused_attn.backends import cpp; print(cpp.isa())"
    env = {"FUSED_ATTN_CPU_ISA": "generic"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "generic\n"


NUMBERS = {
    "float32": np.float32(0.25),
    "float64": np.float64(0.25),
    "tensor": torch.tensor(0.25),
    "bfloat16_tensor": torch.tensor(0.25, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_other_types(name):
    """NumPy scalars and 0-dimensional tensors are accepted as scale, dropout_p and softcap."""
    number, x = NUMBERS[name], torch.randn(1, 2, 5, 8)
    leaf = x.clone().requires_grad_()
    attend = partial(F.scaled_dot_product_attention, key=x, value=x)
    want = attend(x, scale=0.25)
    torch.testing.assert_close(
        want, torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=number)
    )
    assert torch.equal(attend(x, scale=number), want)
    assert torch.equal(attend(leaf, scale=number), want)
    with FlopCounterMode(display=False):
        assert torch.equal(attend(leaf, scale=number), want)
    assert torch.equal(attend(x, softcap=number), attend(x, softcap=0.25))
    dropped = []
    for dropout_p in (0.25, number):
        torch.manual_seed(0)
        dropped.append([attend(x, dropout_p=dropout_p), F.layer_norm(x, 8, dropout_p=dropout_p)])
    assert all(map(torch.equal, *dropped))
