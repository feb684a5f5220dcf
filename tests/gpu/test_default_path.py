"""Attention on the default backends of a GPU.

test_checks.py covers every kind of mask, grouped queries, lse and softcap.
"""

from __future__ import annotations

import functools

import pytest
import torch
from devices import BACKENDS, DEVICE, DTYPES, ON_GPU, by_torch, named
from helpers import deterministic, random_qkv, short
from judging import as_torch_rounds, assert_judged, attention, skip_if_refused
from mask_cases import MASKS

from fused_attn import functional as F
from fused_attn import masks

SIZES = 2, 4, 40, 70  # batch, num_heads, seqlen_q, seqlen_k
every_backend = pytest.mark.parametrize("backend", BACKENDS)
three_masks = pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.padding([70, 20])], ids=["none", "causal", "padding"]
)
with_padding = pytest.mark.parametrize(
    "mask", [None, masks.padding([70, 20])], ids=["none", "padding"]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)


@functools.cache
def qkv(head_dim=40, head_dim_v=None, num_heads_kv=4, sizes=SIZES):
    batch, num_heads, seqlen_q, seqlen_k = sizes
    return random_qkv(batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)


# ---- masks --------------------------------------------------------------------------------------


@every_backend
@every_dtype
@pytest.mark.parametrize("name", ["alibi", "alibi_batch"])
def test_slopes(name, dtype, backend):
    """Results with ALiBi are within the numerics contract.

    For torch's kernels, the reference rounds the bias to the dtype of the scores, as they do.
    """
    mask = MASKS[name](*SIZES)
    rounded = attention(as_torch_rounds(mask, SIZES, dtype))
    truth = rounded if by_torch(backend) else None
    assert_judged(attention(mask), qkv(), dtype, backend, truth=truth)


# Name -> (shape of a tensor, function that returns the mask as a view of the tensor).
TENSORS = {
    "2d": ((40, 70), lambda t: t),
    "heads": ((4, 40, 70), lambda t: t),
    "full": ((2, 4, 40, 70), lambda t: t),
    "key": ((2, 1, 1, 70), lambda t: t),
    "key_1d": ((1, 70), lambda t: t),
    "query": ((2, 1, 40, 1), lambda t: t),
    "expanded": ((2, 1, 1, 70), lambda t: t.expand(2, 4, 40, 70)),
    "expanded_batch": ((1, 1, 40, 70), lambda t: t.expand(2, 4, -1, -1)),
    "transposed": ((2, 1, 70, 40), lambda t: t.mT),
    "every_second": ((2, 4, 40, 140), lambda t: t[..., ::2]),
    "unaligned": ((2, 1, 43, 75), lambda t: t[..., 1:41, 3:73]),
    "heads_last": ((2, 40, 70, 4), lambda t: t.permute(0, 3, 1, 2)),
}


def mask_tensor(name, kind, device, dtype):
    """Return a mask tensor: bool, float in dtype, or float32 with values exact in bfloat16."""
    shape, view = TENSORS[name]
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(shape, generator=generator) < 0.7
    values = torch.randn(shape, generator=generator).bfloat16()
    if kind == "bool":
        return view(visible.to(device))
    values = values.masked_fill(~visible, float("-inf"))
    mask_dtype = dtype if kind == "float" or dtype == torch.float64 else torch.float32
    return view(values.to(device, mask_dtype))


@every_backend
@every_dtype
@pytest.mark.parametrize("kind", ["bool", "float", "float32"])
@pytest.mark.parametrize("name", TENSORS)
def test_mask_tensors(name, kind, dtype, backend):
    """Masks of any layout, even float32 for 16-bit queries, give results within the contract."""
    mask = functools.partial(mask_tensor, name, kind)
    assert_judged(attention(mask), qkv(), dtype, backend)


@every_backend
@every_dtype
@pytest.mark.parametrize(
    "shape", [(40, 70), (4, 40, 70), (1, 1, 1, 70), (2, 1, 40, 1), (2, 4, 40, 70)], ids=str
)
def test_gradients_of_masks(shape, dtype, backend):
    """The gradient of a float mask is within the numerics contract, even if keys are masked."""
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    if shape[-1] > 1:
        mask[..., 5:30] = float("-inf")
    assert_judged(attention(), {**qkv(), "mask": mask}, dtype, backend)


HIDING = {
    "bool": lambda device, dtype: (torch.arange(40, device=device) % 3 > 0)[:, None].expand(40, 70),
    "float": lambda device, dtype: torch.zeros(40, 70, device=device, dtype=dtype).masked_fill(
        (torch.arange(40, device=device) % 3 == 0)[:, None], float("-inf")
    ),
    "padding": masks.padding([0, 70]),
    "all": lambda device, dtype: torch.zeros(40, 70, device=device, dtype=torch.bool),
}


@every_backend
@every_dtype
@pytest.mark.parametrize("name", HIDING)
def test_rows_without_visible_keys(name, dtype, backend):
    """Outputs and gradients of queries without visible keys are 0, not NaN."""
    got = assert_judged(attention(HIDING[name]), qkv(), dtype, backend)

    def hidden(rows):
        return rows[0] if name == "padding" else rows if name == "all" else rows[:, :, ::3]

    assert not hidden(got["out0"]).any() and not hidden(got["grad_query"]).any()
    assert all(tensor.isfinite().all() for tensor in got.values())


# ---- sizes --------------------------------------------------------------------------------------


@every_backend
@every_dtype
@with_padding
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(1, 1), (3, 3), (20, 20), (36, 36), (100, 100), (192, 192), (256, 256), (40, 24), (64, 100)],
)
def test_head_dim(head_dim, head_dim_v, mask, dtype, backend):
    """Any head_dim up to 256, with any head_dim_v, gives results within the contract."""
    assert_judged(attention(mask), qkv(head_dim, head_dim_v), dtype, backend)


def low(tensors):
    """Return operands whose scores are near -128 for head_dim 64, so lse is far below -88."""
    offsets = {"query": 4.0, "key": -4.0, "value": 0.0}
    return {name: 0.1 * tensor + offsets[name] for name, tensor in tensors.items()}


@every_backend
@every_dtype
@pytest.mark.parametrize("seqlen_k", [64, 192, 320])
@pytest.mark.parametrize("kind", ["bool", "float", "padding"])
def test_lengths_that_cudnn_computes_wrongly(kind, seqlen_k, dtype, backend):
    """Masked calls with a very negative lse are correct; cuDNN's results are wrong.

    https://github.com/pytorch/pytorch/issues/196678
    """
    made = {
        "bool": lambda device, dtype: torch.ones(
            128, seqlen_k, dtype=torch.bool, device=device
        ).tril(seqlen_k // 2),
        "float": lambda device, dtype: torch.full((128, seqlen_k), -100.0, device=device).to(dtype),
        "padding": masks.padding([seqlen_k, seqlen_k - 9]),
    }
    tensors = qkv(64, sizes=(2, 2, 128, seqlen_k), num_heads_kv=2)
    got = assert_judged(attention(made[kind]), low(tensors), dtype, backend)
    assert all(tensor.isfinite().all() for tensor in got.values())


@every_backend
@every_dtype
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@with_padding
def test_one_query(mask, gradients, dtype, backend):
    """Calls with one query are correct, even if lse is very negative.

    https://github.com/NVIDIA/cudnn-frontend/issues/1072
    """
    tensors = qkv(64, sizes=(2, 4, 1, 70), num_heads_kv=4)
    for given in (tensors, low(tensors)):
        got = assert_judged(attention(mask), given, dtype, backend, gradients=gradients)
        assert all(tensor.isfinite().all() for tensor in got.values())


@every_backend
@every_dtype
@pytest.mark.parametrize("sizes", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)], ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
def test_empty(mask, sizes, dtype, backend):
    batch, heads, m, n = sizes
    query, key, value = (
        torch.randn(batch, heads, s, 16, device=DEVICE, dtype=dtype, requires_grad=True)
        for s in (m, n, n)
    )
    out = F.scaled_dot_product_attention(query, key, value, mask, backend=named(backend))
    out.sum().backward()
    assert out.shape == query.shape and not out.any()
    assert all(t.grad is None or not t.grad.any() for t in (query, key, value))


# ---- dropout ------------------------------------------------------------------------------------


@every_backend
@every_dtype
@three_masks
def test_dropout_by_the_generator(mask, dtype, backend):
    """Results and gradients are bitwise identical with the same seed of torch's generator."""
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in qkv().values()]
    given = None if mask is None else mask.to(DEVICE)

    def run(seed):
        torch.manual_seed(seed)
        out = F.scaled_dot_product_attention(*leaves, given, 0.3, backend=named(backend))
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    with deterministic():
        first, again, other = run(0), run(0), run(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert all(t.isfinite().all() for t in first)


@every_backend
@every_dtype
def test_rate_of_dropout(dtype, backend):
    """The kept weights are scaled by 1 / (1 - p), and a fraction of about 1 - p is kept."""
    n, p = 64, 0.25
    query, key = torch.zeros(2, 2, 4, n, n, device=DEVICE, dtype=dtype).unbind()
    value = torch.eye(n, device=DEVICE, dtype=dtype).expand(2, 4, n, n)
    weights = F.scaled_dot_product_attention(query, key, value, None, p, backend=named(backend))
    kept = weights != 0
    deviation = (p * (1 - p) * kept.numel()) ** 0.5
    assert abs(kept.sum().item() - (1 - p) * kept.numel()) < 5 * deviation
    want = torch.full_like(weights, 1 / (1 - p) / n)
    torch.testing.assert_close(weights[kept], want[kept])


# ---- other results ------------------------------------------------------------------------------


@every_backend
@every_dtype
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_layouts_of_operands(layout, dtype, backend):
    """Views are valid operands: transposed heads, slices of projections, expanded batches."""

    def view(tensor):
        if layout == "transposed":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
        return tensor[:1].expand_as(tensor)

    def of(name):
        call = attention(masks.padding([70, 20]))(name)
        return lambda query, key, value: call(view(query), view(key), view(value))

    assert_judged(of, qkv(), dtype, backend)


@pytest.mark.skipif(not ON_GPU, reason="reason: needs a GPU")
def test_default_on_a_gpu_is_torch():
    """Without verified kernels, torch's kernels run all calls that they support."""
    query, key, value = (t.to(DEVICE).requires_grad_() for t in qkv().values())
    torch.manual_seed(0)
    with skip_if_refused():
        by_name = F.scaled_dot_product_attention(query, key, value, None, backend="sdpa")
    assert torch.equal(by_name, F.scaled_dot_product_attention(query, key, value, None))
