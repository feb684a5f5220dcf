"""Backend "sdpa" on CUDA, tested without a GPU: the arguments of torch's kernels, and their bugs.

Fake tensors replace CUDA tensors. Tests of values pass the operands of torch's CUDA kernel to a CPU
kernel.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import random_qkv
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_attn as fa
from fused_attn.backends import AttentionProblem, denylist, get_backend, sdpa


@pytest.mark.parametrize("is_causal", [False, True])
def test_lse_on_cuda(is_causal, monkeypatch):
    """lse comes from torch's flash attention, which receives the options of the call."""
    flash = mock.Mock(wraps=torch.ops.aten._scaled_dot_product_flash_attention)
    monkeypatch.setattr(sdpa, "_aten", SimpleNamespace(_scaled_dot_product_flash_attention=flash))
    with FakeTensorMode():
        there = {"device": "cuda", "dtype": torch.bfloat16}
        q, (k, v) = torch.empty(2, 4, 33, 32, **there), torch.empty(2, 2, 2, 33, 32, **there)
        options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True, "return_lse": True}
        out, lse = fa.scaled_dot_product_attention(q, k, v, backend="sdpa", **options)
    flash.assert_called_once_with(*[mock.ANY] * 3, 0.0, is_causal, False, scale=0.3)
    assert [t.shape for t in flash.call_args.args[:3]] == [(2, 4, 33, 32)] * 3
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 33), torch.float32, "cuda")


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, None),
        ({"mask": "causal"}, None),
        ({"mask": "causal", "seqlen_k": 47}, "if the lengths differ or are 0"),
        ({"mask": "causal", "seqlen_q": 0, "seqlen_k": 0}, "if the lengths differ or are 0"),
        ({"mask": "dense"}, "cannot return lse with a mask other than causal on cuda"),
        ({"dtype": torch.float32}, "cannot return lse for torch.float32 on cuda"),
        ({"head_dim": 36, "head_dim_v": 36}, "cannot return lse for head_dim 36 on cuda"),
        ({"head_dim_v": 40}, "cannot return lse if head_dim_v differs from head_dim"),
        ({"dropout": True}, "cannot return lse with dropout"),
        ({"needs_grad": True}, "cannot backpropagate through lse"),
    ],
    ids=str,
)
def test_refusals_of_lse_on_cuda(properties, reason):
    sizes = {"head_dim": 32, "head_dim_v": 32, "seqlen_q": 33, "seqlen_k": 33, "result": "lse"}
    properties = {"device": torch.device("cuda"), "dtype": torch.bfloat16, **sizes, **properties}
    reasons = get_backend("sdpa").unsupported(AttentionProblem(**properties))
    assert not reasons if reason is None else reason in reasons[0]


@pytest.mark.parametrize("num_heads_kv", [4, 2])
def test_gradients_if_torch_pads_head_dim(num_heads_kv, monkeypatch):
    """Gradients are correct if torch pads head_dim to a multiple of 8, as it does on CUDA."""
    kernel, seen = sdpa.torch_sdpa, []

    def attend(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
        dim, group = query.shape[3], query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        padded = [F.pad(t, (0, -dim % 8)) for t in (query, key, value)]
        seen.append(padded[0].shape[3])
        scale = dim**-0.5 if scale is None else scale
        return kernel(*padded, mask, dropout_p, is_causal, scale=scale)[..., :dim]

    monkeypatch.setattr(sdpa, "torch_sdpa", attend)
    shape = 2, 4, num_heads_kv, 33, 47, 20
    q, k, v = (t.requires_grad_() for t in random_qkv(*shape).values())
    given = torch.randn(2, 4, 33, 20)

    def gradients(backend):
        options = {"is_causal": True, "enable_gqa": True, "backend": backend}
        out = fa.scaled_dot_product_attention(q, k, v, **options)
        return torch.autograd.grad(out, (q, k, v), given)

    torch.testing.assert_close(gradients("sdpa"), gradients("eager"), rtol=1e-4, atol=1e-4)
    assert seen == [24]


@pytest.mark.parametrize("shape", [(3, 4, 33, 1), (33, 1), (1,), (3, 1, 33, 47)])
@pytest.mark.parametrize("transposed", [False, True])
def test_masks_are_dense_in_keys(shape, transposed):
    """Masks are contiguous in their last dimension, as torch's memory-efficient kernel requires."""
    mask = torch.rand(shape) < 0.5
    mask = mask.mT.contiguous().mT if transposed and len(shape) > 1 else mask
    dense = sdpa._dense_in_keys(mask, 47)
    assert dense.stride(-1) == 1
    assert dense.shape == (*mask.shape[:-1], 47)  # other dimensions stay broadcast
    assert torch.equal(dense, mask.expand(*shape[:-1], 47))
    assert sdpa._dense_in_keys(dense, 47) is dense


@pytest.fixture
def received(monkeypatch):
    """Return a function that makes a call of 8 heads, with 2 key/value heads, on a GPU.

    It returns the arguments of torch's function: the number of key heads and the scale. It also
    returns whether cuDNN is allowed during the call.
    """

    def of(
        capability=90, *, dtype=torch.bfloat16, sizes=(64, 64), masked=False, learned_bias=False,
        trains=False, is_causal=False, scale=None,
    ):  # fmt: skip
        given = []

        def noted(query, key, value, *rest, scale, enable_gqa):
            assert enable_gqa == (key.shape[1] == 2)
            given.append((key.shape[1], scale, torch.backends.cuda.cudnn_sdp_enabled()))
            return query.new_empty((*query.shape[:3], value.shape[3]))

        monkeypatch.setattr(sdpa, "torch_sdpa", noted)
        # It indexes the mask, which fails for fake CUDA tensors in CPU builds of torch.
        monkeypatch.setattr(sdpa, "_requiring_grad", lambda query, mask: query)
        for module in (sdpa, denylist):
            monkeypatch.setattr(module, "capability_of", lambda device: capability)
        denylist._is_denied.cache_clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            there, mask = {"device": "cuda", "dtype": dtype}, None
            q = torch.empty(2, 8, sizes[0], 64, **there, requires_grad=trains)
            k = torch.empty(2, 2, sizes[1], 64, **there)
            if masked:
                mask = torch.empty(*sizes, device="cuda", dtype=torch.bool)
            elif learned_bias:
                mask = torch.empty(*sizes, **there, requires_grad=True)
            sdpa._attention(q, k, k, sdpa.TorchArguments(mask, is_causal), 0.0, scale, True)
        assert torch.backends.cuda.cudnn_sdp_enabled()  # restored
        heads, scale, cudnn = given[0]
        return SimpleNamespace(heads=heads, scale=scale, cudnn=cudnn)

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    yield of
    denylist._is_denied.cache_clear()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"masked": True}, True),
        ({"masked": True, "trains": True}, False),  # pytorch/pytorch#196678
        ({"masked": True, "trains": True, "capability": None}, False),
        ({"learned_bias": True}, False),
        ({"trains": True}, True),
        ({"trains": True, "is_causal": True}, True),
        ({"sizes": (1, 64)}, True),
        ({"sizes": (1, 64), "trains": True}, False),
        ({"sizes": (1, 64), "trains": True, "is_causal": True}, False),
        ({"sizes": (1, 64), "capability": 100}, False),
        ({"sizes": (2, 64), "capability": 100}, True),
    ],
    ids=str,
)
def test_cudnn_is_disabled_where_it_has_bugs(received, options, allowed):
    assert received(**options).cudnn == allowed


def test_cudnn_runs_masked_calls_under_no_grad(received):
    with torch.no_grad():
        assert received(masked=True, trains=True).cudnn


@pytest.mark.parametrize(
    ("capability", "version", "denied"),
    [
        ((9, 0), "2.13.0+cu130", True),
        ((9, 0), "2.12.0a0+git1", True),
        ((9, 0), "2.10.1", False),
        ((8, 0), "2.13.0", False),
        ((10, 0), "2.13.0", False),
    ],
    ids=str,
)
def test_denylist(capability, version, denied, monkeypatch):
    """Denylist entries apply only to their versions and architectures, and cite a source."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "__version__", version)
    device = torch.device("cuda")
    found = denylist.reason_against("cudnn", denylist.MASK_WITH_GRADIENTS, device)
    assert bool(found) == denied
    assert all(defect.source.startswith("https://") for defect in denylist.DEFECTS.values())


def test_cudnn_stays_disabled_if_the_user_disabled_it(monkeypatch):
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with sdpa._CudnnOff():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_cudnn_under_compile(monkeypatch):
    """The compiled graph disables cuDNN before it calls torch's SDPA, and enables it afterwards."""
    monkeypatch.setattr(sdpa, "_cudnn_is_denied", lambda *tensors: True)
    nodes = []

    def backend(graph, inputs):
        nodes.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = torch.randn(1, 2, 16, 16)
    mask = torch.rand(16, 16) < 0.9

    @torch.compile(fullgraph=True, backend=backend)
    def call(x, mask):
        return fa.scaled_dot_product_attention(x, x, x, mask, backend="sdpa")

    want = F.scaled_dot_product_attention(x, x, x, mask)
    torch.testing.assert_close(call(x, mask).nan_to_num(), want.nan_to_num())
    switch = torch.nn.attention._sdpa_kernel
    assert nodes.count(switch) == 2
    between = nodes[nodes.index(switch) : len(nodes) - nodes[::-1].index(switch)]
    assert torch._C._nn.scaled_dot_product_attention in between
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_grouped_heads_do_not_reach_the_math_kernel(received, monkeypatch):
    """Keys are repeated if the memory-efficient kernel, which lacks GQA, is the only candidate."""
    assert received(80, masked=True).heads == 8
    assert received(80).heads == 2  # flash
    assert received(80, dtype=torch.float32).heads == 8
    assert received(80, is_causal=True, sizes=(64, 70)).heads == 8
    assert received(90, masked=True).heads == 2  # cuDNN
    assert received(90, masked=True, trains=True).heads == 8
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    assert received(80, masked=True).heads == 2


@pytest.mark.parametrize(("scale", "positive"), [(-0.5, 0.5), (0.0, 1.0), (0.5, 0.5)])
def test_scales_are_positive(received, scale, positive):
    assert received(scale=scale).scale == positive


def test_a_mask_alone_that_requires_grad():
    """query is made to require grad, but its values and the gradient of the mask do not change."""
    query, key = torch.randn(2, 1, 2, 4, 8)
    mask = torch.full((4, 4), 0.1).index_fill(1, torch.tensor([0]), float("-inf")).requires_grad_()
    required = sdpa._requiring_grad(query, mask)
    assert required.requires_grad and torch.equal(required, query)
    outs = [F.scaled_dot_product_attention(q, key, key, mask) for q in (required, query)]
    torch.testing.assert_close(*(torch.autograd.grad(o.sin().sum(), mask)[0] for o in outs))


def test_masks_that_are_too_large_are_split(monkeypatch):
    """A mask of more than _MAX_MASK elements per head is split by rows, unless it has one row."""
    monkeypatch.setattr(sdpa, "_MAX_MASK", 64)
    with FakeTensorMode():
        shapes = (1, 2, 20, 8), (1, 2, 8, 8), (1, 2, 20, 8), (1, 2, 1, 8)
        query, key, mask, row = (torch.empty(shape, device="cuda") for shape in shapes)
        parts = sdpa._row_parts(query, key, mask)
        assert [(q.shape[2], m.shape[2]) for q, m in parts] == [(4, 4)] * 5
        assert len(sdpa._row_parts(query, key, row)) == 1
        assert len(sdpa._row_parts(query, key, None)) == 1
