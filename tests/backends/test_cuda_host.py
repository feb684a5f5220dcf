"""Host code of the CUDA backend: tensor layouts, summaries of masks, and errors."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from helpers import BACKENDS

if "cuda" not in BACKENDS:
    pytest.skip("reason: needs a GPU, or CUDA_EMULATED=1", allow_module_level=True)

from helpers import device_of

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import AttentionProblem, cuda, get_backend
from fused_attn.backends.cuda import module
from fused_attn.backends.cuda.attention import CHUNK_BYTES, MAX_ROW_STRIDE, in_chunks
from fused_attn.backends.cuda.module import compiled, run
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.spec import MaskSpec

DEVICE = device_of("cuda")
CUDA = get_backend("cuda")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
ALMOST_ALL = 0.98


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("visible", [0.0, 1.0, ALMOST_ALL])
@pytest.mark.parametrize("shape", [(2, 3, 40, 70), (1, 2, 33, 64), (2, 1, 1, 200), (1, 1, 64, 1)])
def test_summaries_are_those_of_the_cpu(shape, visible, dtype):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(shape, generator=generator) < visible
    if dtype != torch.bool:
        mask = torch.zeros(shape, dtype=dtype).masked_fill(~mask, float("-inf"))
        if visible == 1.0:
            mask[..., -1, -1] = -0.0  # -0.0 does not change a score
        if visible == ALMOST_ALL:
            mask[0, 0, 0, 0] = float("nan")
    every_other = torch.stack([mask, mask], -1)[..., 0]
    for tensor in (mask, mask.mT.contiguous().mT, every_other):
        assert torch.equal(
            CUDA.tile_summary(tensor.to(DEVICE)).cpu(), get_backend("cpp").tile_summary(tensor)
        )


@pytest.mark.parametrize("seqlen", [1, 32, 33, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_ranges_of_document_ids(batch, seqlen):
    """The range of document ids in each tile is exact, even if sequences share one row of ids."""
    generator = torch.Generator().manual_seed(seqlen)
    ids = torch.randint(-(2**31), 2**31 - 1, (batch, seqlen + 5), generator=generator)[:, :seqlen]
    on_device = ids.to(DEVICE)
    shape = (batch, -(-seqlen // compiled().ID_RANGE_TILE), 2)
    ranges = [torch.zeros(shape, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    x = torch.zeros(3, 1, seqlen, 8, device=DEVICE)
    spec = MaskSpec(query_documents=on_device, key_documents=on_device)
    fields = {"query_id_ranges": ranges[0], "key_id_ranges": ranges[1]}
    run("id_ranges", DEVICE, AttentionCall(x, x, x, spec, AttentionOptions(1.0)), fields)
    tiles = ids.split(compiled().ID_RANGE_TILE, 1)
    want = torch.stack([torch.stack(tile.aminmax(dim=1), -1) for tile in tiles], 1)
    assert all(torch.equal(got.cpu().long(), want) for got in ranges)


def test_tensors_that_kernels_read_in_place():
    for tensor in (
        torch.randn(2, 3, 5, 8),
        torch.randn(2, 5, 3, 8).transpose(1, 2),
        torch.randn(2, 5, 3, 3, 8).unbind(2)[1].transpose(1, 2),
        torch.randn(2, 1, 5, 8).expand(2, 3, 5, 8),
        torch.randn(4 * 8)[4:].as_strided((1, 1, 3, 4), (1, 3, 4, 1)),  # one batch and one head
        torch.randn(2, 3, 5, 64, dtype=torch.float16)[..., 8:16],
        torch.randn(2, 3, 5, 0),
    ):
        assert in_chunks(tensor) is tensor


def test_tensors_that_are_copied():
    """Tensors that kernels cannot read in place are copied to zero-padded, aligned rows."""
    two_rows = torch.empty(MAX_ROW_STRIDE + 8)
    for tensor in (
        torch.randn(2, 3, 5, 7),
        torch.randn(2, 3, 5, 4, dtype=torch.bfloat16),
        torch.randn(2, 3, 5, 12)[..., :6],
        torch.randn(2, 3, 5, 9)[..., :8],  # row stride of 9 floats
        torch.randn(2, 3, 5, 16)[..., 2:10],  # rows begin inside a chunk
        torch.randn(2, 3, 5, 16)[..., ::2],
        torch.randn(1, 1, 1, 1).expand(2, 3, 5, 8),
        two_rows.as_strided((1, 1, 2, 8), (8, 8, MAX_ROW_STRIDE, 1)),
        torch._neg_view(torch.randn(2, 3, 5, 8)),
    ):
        copy, size = in_chunks(tensor), tensor.shape[3]
        assert copy is not tensor and torch.equal(copy.nan_to_num(), tensor.nan_to_num())
        step = CHUNK_BYTES // tensor.element_size()
        assert copy.stride(3) == 1 and all(stride % step == 0 for stride in copy.stride()[:3])
        padded = copy.as_strided((*copy.shape[:3], -(-size // step) * step), copy.stride())
        assert padded[..., size:].eq(0).all()


def test_errors_describe_the_call():
    x = torch.zeros(1, 1, 8, 512, device=DEVICE)
    call = AttentionCall(x, x, x, MaskSpec(), AttentionOptions(1.0))
    with pytest.raises(RuntimeError, match=r"attention_fwd.*head_dim 512.*no kernel is compiled"):
        run("attention_fwd", DEVICE, call, {"out": x, "lse": x[..., 0].contiguous()})
    fields = {"tensor": x, "summary": torch.empty(1, 1, 1, 8, dtype=torch.uint8, device=DEVICE)}
    with pytest.raises(ValueError, match="do not read the fields summery"):
        run("tile_summary", DEVICE, None, {**fields, "summery": 0})


def test_choice():
    problem = AttentionProblem(DEVICE, torch.float16, 256, 257)
    assert CUDA.opt_in_reasons(problem)
    assert CUDA.unsupported(problem) == ["supports head_dim_v up to 256, not 257"]
    for dims in ((0, 8), (8, 0)):  # empty rows have no address
        assert CUDA.unsupported(AttentionProblem(DEVICE, torch.float16, *dims))
    other = torch.device("cuda" if DEVICE.type == "cpu" else "cpu")
    assert "runs on" in CUDA.unsupported(AttentionProblem(other, torch.float16, 8, 8))[0]
    assert CUDA.unsupported(AttentionProblem(DEVICE, torch.float64, 8, 8))


def test_gpus_that_cannot_run_the_kernels_are_refused(monkeypatch):
    """A GPU is refused if the module was compiled for other GPUs or for a newer driver."""
    assert compiled().launch_obstacle() is None
    stand_in = SimpleNamespace(launch_obstacle=lambda: "no kernel image is available")
    monkeypatch.setattr(module, "_cuda", stand_in)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for name, result in (("emulated", False), ("unavailable", []), ("too_old", [])):
        monkeypatch.setattr(cuda, name, lambda *args, result=result: result)
    problem = AttentionProblem(torch.device("cuda", 63), torch.float16, 64, 64)
    assert CUDA.unsupported(problem) == [
        "its kernels cannot run on this GPU: no kernel image is available"
    ]


@pytest.mark.parametrize("scale", [1e-46, 1e-50])
def test_scales_that_are_0_in_float32(scale):
    """Causal attention averages the visible values if the scale rounds to 0."""
    x = torch.randn(3, 1, 1, 130, 64, device=DEVICE, dtype=torch.bfloat16)
    out = F.scaled_dot_product_attention(*x, masks.causal(), scale=scale, backend="cuda")
    means = x[2].float().cumsum(-2) / torch.arange(1, 131, device=DEVICE)[:, None]
    torch.testing.assert_close(out.float(), means, rtol=0, atol=2e-2)


def test_tensors_on_other_devices_are_refused():
    """CPU tensors are refused, because a kernel that reads host memory breaks the CUDA context."""
    on_cpu = torch.zeros(1, 1, 8, 64, dtype=torch.bool)
    fields = {"tensor": on_cpu, "summary": on_cpu.new_empty(1, 1, 1, 1)}
    with pytest.raises(ValueError, match="must be on one device, got one on cpu"):
        compiled().tile_summary(None, **fields, device=0, stream=0)
