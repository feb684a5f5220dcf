"""CUDA norms for shapes that test_norm.py does not cover: many, wide, misaligned and odd rows."""

import pytest
import torch
from helpers import BACKENDS, assert_like_eager, device_of, short
from norm_cases import norm, tensors_of

from fused_attn import functional as F
from fused_attn.backends.cuda import norm as cuda_norm

pytestmark = pytest.mark.skipif("cuda" not in BACKENDS, reason="needs a GPU, or CUDA_EMULATED=1")

# (rows, columns). Rows are computed by part of a warp, a warp, half a block or a block. Rows of 333
# columns are read element by element. The last three shapes are read in chunks: of single elements,
# only in the backward, and in both passes. The sums of the last shape exceed shared memory.
SHAPES = [(150, 64), (21, 512), (9, 1040), (5, 4096), (40, 333), (3, 4099), (3, 6401), (5, 12304)]


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """Limit the backward to at most two blocks, so that blocks compute several rounds of rows."""
    monkeypatch.setattr(cuda_norm, "num_multiprocessors", lambda device: 1)


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_rounds_of_rows(kind, dropout_p, shape, dtype):
    tensors = tensors_of(kind, shape, dropout_p > 0.0, True)
    assert_like_eager(norm(kind, dropout_p=dropout_p), tensors, dtype, "cuda")


def test_more_partial_sums_than_warps(monkeypatch):
    """Gradients are within the contract if 32 warps of the backward add 35 partial sums."""
    monkeypatch.setattr(cuda_norm, "num_multiprocessors", lambda device: 20)
    tensors = tensors_of("layer_norm", (70, 1040), False, True)
    assert_like_eager(norm("layer_norm"), tensors, torch.float32, "cuda")


def test_16_bit_row_in_chunks():
    assert_like_eager(
        norm("layer_norm"), tensors_of("layer_norm", (2, 24680), True, True), torch.bfloat16, "cuda"
    )


@pytest.mark.parametrize("columns", [12304, 6401])
def test_cancellation_over_chunks(columns):
    """Norms are within the numerics contract if a row's first chunk is far from the row's mean."""
    noise = torch.randn(2, columns, generator=torch.Generator().manual_seed(1))
    tensors = {"input": noise + torch.linspace(-1.0e3, 1.0e3, columns)}
    assert_like_eager(norm("layer_norm"), tensors, torch.float32, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_tensors_off_16_bytes(dtype):
    def shifted(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)

    def of(backend):
        return lambda input, weight, norm_bias: (
            F.layer_norm(shifted(input), 64, shifted(weight), norm_bias, backend=backend),
        )

    assert_like_eager(of, tensors_of("layer_norm", (33, 64), False, True), dtype, "cuda")


@pytest.mark.parametrize("columns", [7, 24, 700, 4096, 12304])
def test_nonfinite_rows_do_not_affect_others(columns):
    """Rows with NaN or infinity become NaN; other rows of the same warp or block do not change."""
    clean, grad = torch.randn(2, 6, columns, generator=torch.Generator().manual_seed(2))
    bad = clean.clone()
    bad[2, 3], bad[0, -1] = float("nan"), float("inf")
    runs = []
    for rows in (clean, bad):
        leaf = rows.to(device_of("cuda")).requires_grad_()
        out = F.layer_norm(leaf, columns, backend="cuda")
        out.backward(grad.to(leaf.device))
        runs.append([out.detach().cpu(), leaf.grad.cpu()])
    for good, got in zip(*runs, strict=True):
        assert torch.equal(got[[1, 3, 4, 5]], good[[1, 3, 4, 5]])
        assert got[[0, 2]].isnan().all()


@pytest.mark.parametrize(("columns", "value"), [(3, 1.0e38), (12304, 2.0e34)])
def test_huge_mean(columns, value):
    """Outputs and gradients are finite if the square of the mean overflows float32."""
    options = {"device": device_of("cuda"), "requires_grad": True}
    leaf, weight = torch.full((2, columns), value, **options), torch.ones(columns, **options)
    out = F.layer_norm(leaf, columns, weight, eps=1e-12, backend="cuda")
    out.sum().backward()
    assert all(tensor.isfinite().all() for tensor in (out, leaf.grad, weight.grad))
