"""Triton norms with rows that span several chunks, and with weights of a different dtype."""

import pytest
import torch
from helpers import BACKENDS, assert_like_eager, device_of, short
from norm_cases import norm, tensors_of

pytestmark = pytest.mark.skipif(
    "triton" not in BACKENDS, reason="needs a GPU, or TRITON_INTERPRET=1"
)

# (rows, columns). In the interpreter, at most 4 programs of 4 rows each sum the weight gradients:
# 19 rows take two rounds. The last chunk has 8 columns in the backward, and 16 in the forward.
WIDE = [(19, 8200), (3, 16400)]


@pytest.mark.sampled("covered by dropout", dropout_p=[0.0], dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_rows_of_several_chunks(kind, dropout_p, shape, dtype):
    tensors = tensors_of(kind, shape, True, True)
    assert_like_eager(norm(kind, dropout_p=dropout_p), tensors, dtype, "triton")


def test_cancellation_over_chunks():
    noise = torch.randn(3, 16400, generator=torch.Generator().manual_seed(1))
    tensors = {"input": noise + 1.0e4}
    assert_like_eager(norm("layer_norm"), tensors, torch.float32, "triton")


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_weights_of_another_type(kind):
    """Outputs and gradients of float32 inputs with bfloat16 weights match float32 eager norms."""
    tensors = tensors_of(kind, (40, 96), True, True)
    wanted = {n: t.to(torch.bfloat16) if n[0] in "wn" else t for n, t in tensors.items()}
    runs = []
    for backend, dtype in (("triton", torch.bfloat16), ("eager", torch.float32)):
        device = device_of(backend)
        leaves = {
            n: t.to(device, dtype if n[0] in "wn" else t.dtype, copy=True).requires_grad_()
            for n, t in wanted.items()
        }
        out, total = norm(kind)(backend)(**leaves)
        (out.square().sum() + total.sum()).backward()
        runs.append([out, total, *(leaf.grad for leaf in leaves.values())])
    for got, truth in zip(*runs, strict=True):
        torch.testing.assert_close(got.cpu(), truth.to(got.dtype))
