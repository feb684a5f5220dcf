"""attention_with_weights against eager attention, its ops, and MultiheadAttention's weights."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
import torch
from enable_helpers import spy_on_masks
from helpers import (
    BACKENDS,
    DTYPES,
    FLOAT64_BACKENDS,
    ONE_16_BIT_TYPE,
    assert_like_eager,
    device_of,
    dropout_seed,
    random_qkv,
    short,
)
from mask_cases import FIELDS, MASKS
from nn_helpers import EMBED, HEADS
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import fused_attn.nn as fnn
from fused_attn import masks
from fused_attn.backends import get_backend
from fused_attn.base import philox
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks import Mask
from fused_attn.masks.spec import MaskSpec, spec_of_mask
from fused_attn.nn.weights import attention_with_weights
from fused_attn.ops import library

AVERAGE = pytest.mark.parametrize("average", [False, True], ids=["heads", "average"])


def with_weights(mask=None, **options):
    """Return function(backend)(query, key, value, bias=None) for `assert_like_eager`."""

    def of(backend):
        def call(query, key, value, bias=None):
            combined = masks.bias(bias) if bias is not None else Mask()
            combined = combined if mask is None else combined & mask.to(query.device)
            return attention_with_weights(query, key, value, combined, backend=backend, **options)

        return call

    return of


# ---- against eager attention --------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [3, 7])
def test_rows_that_one_key_dominates(seed, backend):
    """Gradients of a loss on the weights only are correct in rows that one key dominates."""
    tensors = random_qkv(1, 1, 1, 4, 3, 64, seed=seed)
    tensors["query"] *= 80.0

    def weights(backend):
        def call(query, key, value):
            return attention_with_weights(query, key, value, backend=backend)[1:]

        return call

    assert_like_eager(weights, tensors, torch.bfloat16, backend)


@pytest.mark.thinned(
    "kernels receive mask fields; test_attention.py covers the rest", name=set(MASKS) - set(FIELDS)
)
@pytest.mark.parametrize("backend", BACKENDS)
@AVERAGE
@pytest.mark.thinned("averaging computes the weights of every head", average=[False])
@pytest.mark.parametrize("name", [None, *MASKS])
def test_masks(name, average, backend):
    """Output, weights and gradients match eager attention over several tiles, for every mask."""
    shape = (2, 3, 70, 150)
    tensors = random_qkv(*shape[:2], 3, *shape[2:], 16)
    mask = None if name is None else MASKS[name](*shape)
    assert_like_eager(with_weights(mask, average=average), tensors, torch.float32, backend)


@pytest.mark.thinned("averaged weights run in bfloat16", average=[False], dtype=[torch.bfloat16])
@pytest.mark.thinned("float32 covers them", dtype=[torch.bfloat16], bias=[(4, 1, 150), (33, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@AVERAGE
@ONE_16_BIT_TYPE
@pytest.mark.parametrize(
    "bias", [(2, 4, 33, 150), (4, 1, 150), (33, 150), (33, 1)], ids=lambda s: "x".join(map(str, s))
)
def test_types_and_float_masks(bias, average, dtype, backend):
    """Results and gradients match eager attention with GQA, dropout and a broadcast float mask."""
    tensors = random_qkv(2, 4, 2, 33, 150, 40)
    tensors["bias"] = torch.randn(bias, generator=torch.Generator().manual_seed(1))
    function = with_weights(MASKS["ragged"](2, 4, 33, 150), average=average, dropout_p=0.25)
    assert_like_eager(function, tensors, dtype, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@AVERAGE
def test_instruction_sets(average, dtype, isa):
    tensors = random_qkv(1, 2, 1, 70, 140, 33)
    function = with_weights(masks.causal("bottom_right"), average=average, dropout_p=0.1)
    assert_like_eager(function, tensors, dtype, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 5, 0), (0, 2, 3, 4), (1, 2, 0, 3)], ids=str)
@AVERAGE
def test_small_and_empty(average, shape, backend):
    batch, heads, seqlen_q, seqlen_k = shape
    leaf = torch.randn(batch, heads, seqlen_q, 8, device=device_of(backend), requires_grad=True)
    key = torch.randn(batch, heads, seqlen_k, 8, device=leaf.device)
    _, weights = attention_with_weights(leaf, key, key, average=average, backend=backend)
    expected = (batch, seqlen_q, seqlen_k) if average else shape
    torch.testing.assert_close(weights, torch.ones(expected, device=leaf.device))  # at most one key
    weights.sum().backward()
    assert not leaf.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@AVERAGE
def test_nan_in_masked_keys(average, backend):
    """Masked weights and fully masked rows are exactly 0; NaN in masked keys has no effect."""
    device, options = device_of(backend), {"average": average, "backend": backend}
    tensors = [t.to(device) for t in random_qkv(2, 2, 2, 70, 200, 16).values()]
    mask = masks.padding([150, 0], [70, 30]).to(device)
    expected_out, expected = attention_with_weights(*tensors, mask, **options)
    leaves = [t.clone() for t in tensors]
    for leaf in leaves:
        leaf[1] = leaf[0, :, 150:] = float("nan")  # the query has only 70 rows
        leaf.requires_grad_()
    out, weights = attention_with_weights(*leaves, mask, **options)
    assert torch.equal(out, expected_out) and torch.equal(weights, expected)
    assert not weights[1].any()
    assert not weights[0, ..., 150:].any()
    assert weights[0, ..., :150].all()
    (weights.square().sum() + out.sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_that_of_the_output(backend):
    """Weights have the dropout mask of the output, and are averaged after dropout."""
    device, p = device_of(backend), 0.4
    tensors = [t.to(device) for t in random_qkv(2, 3, 3, 40, 90, 16).values()]
    attend = functools.partial(attention_with_weights, *tensors, None, backend=backend)
    with dropout_seed(5):
        seed = philox.new_seed(device)
    with dropout_seed(5):
        out, weights = attend(p)
    torch.testing.assert_close(weights @ tensors[2], out)
    assert torch.equal(attend(p, seed=seed)[1], weights)
    torch.testing.assert_close(attend(p, seed=seed, average=True)[1], weights.mean(1))
    keep = philox.attention_keep(seed, p, 2, 3, 40, 90)
    assert torch.equal(weights != 0, keep)
    torch.testing.assert_close(weights, attend()[1] * keep * philox.dropout_scale(p))


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@AVERAGE
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradcheck(dropout_p, average, backend):
    def run(query, key, value, bias):
        torch.manual_seed(2)
        mask = masks.bias(bias) & masks.padding([5, 0]) & masks.sliding_window(-1, 2)
        options = {"average": average, "backend": backend}
        return attention_with_weights(query, key, value, mask, dropout_p, **options)

    inputs = tuple(
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, 4, 2), (2, 1, 5, 2), (2, 1, 5, 3), (1, 2, 4, 5))
    )
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs, fast_mode=True)


# ---- the ops ------------------------------------------------------------------------------------


@pytest.mark.thinned("the calls with a bias cover it", bias=[False], dropout_p=[0.0])
@pytest.mark.parametrize("backend", BACKENDS)
@AVERAGE
@pytest.mark.parametrize(("bias", "dropout_p"), [(False, 0.0), (True, 0.0), (False, 0.2)])
def test_opcheck(bias, dropout_p, average, backend):
    device = device_of(backend)
    query, key, value = (t.to(device) for t in random_qkv(2, 4, 2, 20, 70, 16).values())
    mask = masks.causal()
    if bias:
        mask = mask & masks.bias(torch.randn(4, 20, 70, device=device))
    spec = spec_of_mask(mask, 2, 4, 20, 70, query.device)
    seed = philox.new_seed(device) if dropout_p else None
    call = AttentionCall(query, key, value, spec, AttentionOptions(0.25, 0.0, dropout_p, seed))
    _, lse, lse_residual, _ = library.attention_fwd(call, get_backend(backend), True, True)
    args = (*call.flat(), lse, lse_residual)
    torch.library.opcheck(torch.ops.fused_attn.attention_weights.default, (*args, average, backend))
    grad = torch.randn(call.weights_shape(average), device=device)
    torch.library.opcheck(
        torch.ops.fused_attn.attention_weights_bwd.default,
        (*args, grad, average, bias, backend),
    )


def test_op_errors():
    query = torch.randn(1, 2, 3, 8)
    lse = torch.zeros(1, 2, 3)
    op = torch.ops.fused_attn.attention_weights
    cu_seqlens = torch.tensor([0, 3])
    packed = MaskSpec(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)

    def flat(key=query, spec=packed):
        return AttentionCall(query, key, key, spec, AttentionOptions(0.25)).flat()

    with pytest.raises(ValueError, match="weights are not available for packed sequences"):
        op(*flat(), lse, lse, False, "cpp")
    with pytest.raises(ValueError, match=r"lse and lse_residual must have shape \(1, 2, 3\)"):
        op(*flat(spec=MaskSpec()), lse[:, :1], lse, False, "cpp")
    with pytest.raises(ValueError, match="query and key must have the same batch size and"):
        op(*flat(query[..., :4], MaskSpec()), lse, lse, False, "cpp")
    with pytest.raises(ValueError, match=r"grad_weights must have shape \(1, 2, 3, 3\)"):
        torch.ops.fused_attn.attention_weights_bwd(
            *flat(spec=MaskSpec()), lse, lse, lse, False, False, "cpp"
        )


SCRIPT = """
import json, sys, torch
from fused_attn.nn import MultiheadAttention

average = sys.argv[1] == "average"
torch.set_num_threads(1)
attention = MultiheadAttention(32, 16, batch_first=True)

def step(length):
    x = torch.randn(1, length, 32, requires_grad=True)
    out, weights = attention(x, x, x, average_attn_weights=average)
    (out.sum() + weights.square().mean()).backward()

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

step(64)  # loads code and memory pools
open("/proc/self/clear_refs", "w").write("5")  # reset the peak
before = resident("VmRSS")
step(1024)
print(json.dumps(resident("VmHWM") - before))
"""


@pytest.mark.sampled("only averaged weights have a memory limit", average=[False])
@AVERAGE
def test_memory(average):
    """Averaged weights need no tensor of shape (num_heads, L, S), which takes 67 MB here."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "average" if average else "heads"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (json.loads(run.stdout) < 60e6) == average


# ---- MultiheadAttention -------------------------------------------------------------------------


def test_weights_come_from_a_second_op(monkeypatch):
    """By default, a second op computes the weights; the output is the same without them."""
    calls = []
    for name in ("attention_fwd", "attention_weights"):
        real = getattr(library, name)
        monkeypatch.setattr(
            library, name, lambda *a, real=real, name=name: calls.append(name) or real(*a)
        )
    ours = fnn.MultiheadAttention(EMBED, HEADS)
    x = torch.randn(40, 2, EMBED)
    out, _ = ours(x, x, x)
    assert calls == ["attention_fwd", "attention_weights"]
    assert torch.equal(out, ours(x, x, x, need_weights=False)[0])


def test_masks_of_appended_keys(monkeypatch):
    """With appended keys, attention receives a causal band and a (batch, 1, 1, keys) mask."""
    seen = spy_on_masks(monkeypatch)
    ours = fnn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True, add_zero_attn=True)
    x, padding = torch.randn(9, 2, EMBED), torch.zeros(2, 9, dtype=torch.bool)
    ours(x, x, x, padding, need_weights=False, is_causal=True)
    (mask,) = seen
    assert len(mask.bands) == 1
    assert not mask.biases
    assert [tuple(m.shape) for m in mask.dense_masks] == [(2, 1, 1, 11)]


def test_module_with_dropout():
    """The weights that a module returns include the dropout of its output."""
    x = torch.randn(1, 30, EMBED)
    module = fnn.MultiheadAttention(EMBED, HEADS, dropout=0.5, batch_first=True)
    out, weights = module(x, x, x, average_attn_weights=False)
    heads = weights @ module._project(x, x, x)[2]
    torch.testing.assert_close(module.out_proj(module._merge_heads(heads, True)), out)
    assert 0.4 < (weights == 0).float().mean() < 0.6
    assert not torch.allclose(weights.sum(-1), torch.ones(1, HEADS, 30), atol=0.1)


@AVERAGE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype, average):
    ours = fnn.MultiheadAttention(EMBED, HEADS)
    x = torch.randn(7, 2, EMBED)
    with torch.autocast("cpu", dtype):
        out, weights = ours(x, x, x, average_attn_weights=average)
    assert out.dtype == weights.dtype == dtype
    weights.float().square().sum().backward()
    assert ours.in_proj_weight.grad.isfinite().all()


def test_flops_are_counted():
    query, key, value = random_qkv(1, 2, 2, 30, 50, 16).values()
    query.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        attention_with_weights(query, key, value)[1].sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 30 * 50 * 16 * (2 + 1 + 3)
