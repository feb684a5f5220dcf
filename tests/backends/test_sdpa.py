"""Backend "sdpa": torch's kernels, called through this package's functions with its masks."""

import gc
import warnings
import weakref

import device_table
import pytest
import torch
import torch.nn.functional as F
from mask_cases import MASKS
from small_calls import SHAPE, assert_close_to_eager, by, qkv

import fused_attn as fa
from fused_attn import masks
from fused_attn.nn.weights import attention_with_weights
from fused_attn.ops import dispatch

LOOSE = {"rtol": 1e-5, "atol": 1e-5}  # for gradients, and for sums in another order

ONE_HIDDEN = {
    "first_key_of_last_query": lambda b, h, m, n: masks.sliding_window(m - 2, -1),
    "last_key_of_first_query": lambda b, h, m, n: masks.sliding_window(-1, n - 2),
}


@pytest.mark.parametrize("make", [*MASKS.values(), *ONE_HIDDEN.values()], ids=[*MASKS, *ONE_HIDDEN])
def test_masks(make):
    """Outputs and gradients match eager attention, including calls that reuse a cached mask."""
    mask = make(*SHAPE[:4])

    def train():
        leaves = qkv()
        out = fa.scaled_dot_product_attention(*leaves, mask)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    assert_close_to_eager(train, **LOOSE)
    for _ in range(2):  # the second call uses values cached on the mask
        assert_close_to_eager(lambda: fa.scaled_dot_product_attention(*qkv(grad=False), mask))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("return_lse", [False, True])
def test_causal_mask_and_a_scale_that_is_not_positive(return_lse, scale):
    """Causal attention matches eager attention, although torch's CPU kernel returns NaN."""
    options = {"is_causal": True, "scale": scale, "return_lse": return_lse}
    tensors = qkv(grad=False)
    assert_close_to_eager(lambda: fa.scaled_dot_product_attention(*tensors, **options), **LOOSE)


def test_lse_of_transposed_columns():
    """out and lse are correct if the last dimension of the operands is not contiguous."""
    tensors = [t.mT.contiguous().mT for t in qkv(grad=False)]
    assert_close_to_eager(
        lambda: fa.scaled_dot_product_attention(*tensors, return_lse=True), **LOOSE
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_supported_calls_skip_validation(autocast, grad, dropout_p, monkeypatch):
    """Calls that torch supports skip validation and match torch, even with 2-D and 3-D masks."""
    monkeypatch.setattr(dispatch, "select", None)
    q, k, v = qkv(grad=grad)
    visible, bias = torch.rand(2, 4, 33, 50) > 0.3, torch.randn(4, 33, 47)
    visible[..., 0] = True
    given = [
        {},
        {"is_causal": True},
        {"attn_mask": visible[0, 0, :1, :47]},
        {"attn_mask": visible[0, 0, :, :47]},
        {"attn_mask": visible[1, :, :, :47]},
        {"attn_mask": visible[:, :1, :, :47].expand(2, 4, 33, 47)},
        {"attn_mask": bias},
        {"attn_mask": bias[None].clone().requires_grad_(grad)},
    ]
    with fa.use_backend("sdpa"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for options in given * 2:
            torch.manual_seed(0)
            out = fa.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)
            torch.manual_seed(0)
            want = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)
            assert out.requires_grad == grad
            torch.testing.assert_close(out, want, rtol=0, atol=2e-2 if autocast else 2e-6)


@pytest.mark.parametrize("backend", ["sdpa", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unchecked_under_autocast(backend, dtype, monkeypatch):
    """Under autocast, attention runs in the autocast dtype, and norms in the dtype of their input.

    Neither is validated, except that integer tensors are refused.
    """
    q, k, v = qkv(dtype, grad=False)
    half = [t.bfloat16() for t in (q, k, v)]
    mask, w = masks.causal() & masks.padding([47, 20]), torch.randn(32)
    w = w.to(dtype) if backend == "sdpa" else w  # torch refuses mixed dtypes
    expected = by(backend, lambda: fa.scaled_dot_product_attention(*half, mask))
    norm = by(backend, lambda: fa.layer_norm(q, 32, w))
    monkeypatch.setattr(dispatch, "select", None)
    with fa.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fa.scaled_dot_product_attention(q, k, v, mask), expected)
        assert torch.equal(fa.layer_norm(q, 32, w), norm)
        with pytest.raises(TypeError, match="query must be float32"):
            fa.scaled_dot_product_attention(q.int(), k, v)
        with pytest.raises(TypeError, match="input must be float32"):
            fa.layer_norm(q.int(), 32)


@pytest.mark.parametrize("wrong", [(2, 4, 33, 46), (3, 1, 33, 47), (1, 1, 1, 1, 47)])
def test_masks_of_wrong_shapes(wrong):
    with pytest.raises(ValueError, match="attn_mask must"):
        by("sdpa", lambda: fa.scaled_dot_product_attention(*qkv(), torch.ones(wrong) > 0))


@pytest.mark.parametrize("make", [torch.Tensor.clone, masks.bias])
def test_masks_of_more_digits(make):
    """A float64 mask is refused if the operands are float32."""
    mask = make(torch.randn(33, 47, dtype=torch.float64))
    with pytest.raises(ValueError, match="must not be float64"):
        by("sdpa", lambda: fa.scaled_dot_product_attention(*qkv(), mask))


@pytest.mark.parametrize("name", ["none", "causal", "ragged", "dense", "bias_with_inf"])
@pytest.mark.parametrize("average", [False, True])
def test_weights(name, average):
    mask = MASKS[name](*SHAPE[:4]) if name != "none" else None

    def train():
        leaves = qkv(num_heads_kv=2)
        out, weights = attention_with_weights(*leaves, mask, average=average)
        loss = out.square().sum() + weights.square().sum()
        return out, weights, *torch.autograd.grad(loss, leaves)

    assert_close_to_eager(train, **LOOSE)
    torch.manual_seed(0)
    q, k, v = qkv(grad=False)
    out, weights = attention_with_weights(q, k, v, mask, 0.5, backend="sdpa")
    torch.testing.assert_close(out, weights @ v)


def test_a_learned_bias_is_never_cached():
    """A learned bias is not cached, even if it is a view of a constant tensor."""
    q, k, v = qkv()
    constant = torch.randn(33, 47)
    constant[0] = float("-inf")
    bias = constant.view(1, 1, 33, 47).requires_grad_()

    def gradient():
        with torch.no_grad():
            fa.scaled_dot_product_attention(q, k, v, bias)
        bias.grad = None
        for _ in range(2):
            fa.scaled_dot_product_attention(q, k, v, bias).sum().backward()
        return bias.grad

    assert_close_to_eager(gradient, **LOOSE)


def test_masks_of_another_type():
    """A float32 mask is rounded to the dtype of 16-bit operands, as under torch's autocast."""
    q, k, v = (t.bfloat16() for t in qkv(grad=False))
    bias = torch.randn(33, 47)
    got = by("sdpa", lambda: fa.scaled_dot_product_attention(q, k, v, bias))
    assert torch.equal(got, F.scaled_dot_product_attention(q, k, v, bias.bfloat16()))
    x, y = (torch.randn(2, 4, n, 32) for n in (33, 47))
    with torch.autocast("cpu", torch.bfloat16):
        got = by("sdpa", lambda: fa.scaled_dot_product_attention(x, y, y, bias))
        assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("is_causal", [False, True])
def test_second_derivatives_raise_torchs_error(is_causal):
    leaves = qkv()
    for function in (fa.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = by("sdpa", lambda f=function: f(*leaves, is_causal=is_causal))
        (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not impl"):
            grad.sum().backward()


def test_a_backward_frees_the_operands():
    q, k, v = qkv()
    projected = q * 1.0
    seen = weakref.ref(projected)
    with fa.use_backend("sdpa"):
        out = fa.scaled_dot_product_attention(projected, k, v)
    out.sum().backward()
    del projected
    gc.collect()
    assert seen() is None


def test_within_a_checkpoint():
    q, k, v = qkv()

    def call(*tensors):
        return by("sdpa", lambda: fa.scaled_dot_product_attention(*tensors, is_causal=True))

    out = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    got, expected = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, call(q, k, v)))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["none", "causal", "ragged", "dense", "bias_with_inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lse(name, dtype):
    q, k, v = qkv(dtype, grad=False, num_heads_kv=2)
    mask = MASKS[name](*SHAPE[:4]) if name != "none" else None
    if name == "bias_with_inf":
        mask = masks.bias(mask.biases[0].to(dtype))

    def call():
        return fa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, return_lse=True)[1]

    # Eager attention rounds scores to the dtype of the operands.
    assert_close_to_eager(call, atol=2e-6 if dtype == torch.float32 else 0.05)
    assert by("sdpa", call).dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_empty(shape):
    q = torch.randn(*shape[:2], 5, 4, requires_grad=True)
    k = torch.randn(shape, requires_grad=True)
    for dropout_p in (0.0, 0.5):
        out = fa.scaled_dot_product_attention(q, k, k, None, dropout_p, backend="sdpa")
        assert out.shape == q.shape and (out == 0).all()
        out.sum().backward()


def test_refusals():
    q, k, v = qkv()

    def refused(match, **options):
        with pytest.raises(NotImplementedError, match=match):
            fa.scaled_dot_product_attention(q, k, v, backend="sdpa", **options)

    refused("does not support softcap", softcap=3.0)
    refused("cannot backpropagate through lse", return_lse=True)
    with pytest.raises(NotImplementedError, match="transforms"):
        torch.func.grad(lambda q: fa.scaled_dot_product_attention(q, k, v, backend="sdpa").sum())(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_torchs(dtype):
    x, r = torch.randn(2, 5, 24, dtype=dtype).unbind()
    w, b = torch.randn(2, 24, dtype=dtype).unbind()
    layer_norm = F.layer_norm(r + x, (24,), w, b)
    with fa.use_backend("sdpa"):
        assert torch.equal(fa.layer_norm(x, 24, w, b), F.layer_norm(x, (24,), w, b))
        assert torch.equal(fa.rms_norm(x, 24, w, 1e-6), F.rms_norm(x, (24,), w, 1e-6))
        assert torch.equal(fa.layer_norm(x, 24, w, b, residual=r), layer_norm)
        out, total = fa.layer_norm(x, 24, w, b, residual=r, return_residual=True)
        assert torch.equal(out, layer_norm) and torch.equal(total, r + x)
        torch.manual_seed(3)
        dropped = F.dropout(x, 0.4)
        torch.manual_seed(3)
        got = fa.layer_norm(x, 24, w, b, residual=r, dropout_p=0.4)
        assert torch.equal(got, F.layer_norm(r + dropped, (24,), w, b))
        mixed = fa.layer_norm(x, 24, w.float(), b.float())  # mixed dtypes need validation
        torch.testing.assert_close(mixed, F.layer_norm(x, (24,), w, b))


@torch.no_grad()
def test_encoders_run_on_torchs_fused_layers():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    report = fa.swap_modules(model)
    x, ignored = torch.randn(3, 9, 32), torch.arange(9) >= torch.tensor([9, 4, 0])[:, None]
    with fa.use_backend("sdpa"):
        own = [model(x), model(x, src_key_padding_mask=ignored)]
        with torch.profiler.profile() as profile:
            model(x)
    assert sum("_transformer_encoder_layer_fwd" in e.name for e in profile.events()) == 2
    report.restore()
    assert torch.equal(own[0], model(x))
    assert torch.equal(own[1], model(x, src_key_padding_mask=ignored))


def test_with_enable():
    """backend="sdpa" runs torch's kernels even inside enabled(), which patches torch's function."""
    q, k, v = qkv(grad=False)
    expected = F.scaled_dot_product_attention(q, k, v)
    with fa.enabled():
        got = by("sdpa", lambda: fa.scaled_dot_product_attention(q, k, v))
        named = fa.scaled_dot_product_attention(q, k, v, backend="sdpa")
    assert torch.equal(got, expected) and torch.equal(named, expected)


@pytest.mark.sampled("covered by padding", mask=[None, "causal"])
@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_compiles(mask):
    q, k, v = qkv()
    mask = None if mask is None else MASKS[mask](*SHAPE[:4])

    def call(q, k, v):
        out = fa.scaled_dot_product_attention(q, k, v, mask, backend="sdpa")
        return fa.layer_norm(out, 32, backend="sdpa")

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("device_type", device_table.DEVICES)
def test_devices_without_kernels(device_type):
    """On other devices, calls run on torch's kernels by default, and the first one warns."""
    x = torch.randn(1, 2, 8, 16)
    with device_table.pretended(device_type), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dropout_p in (0.0, 0.1, 0.0):
            fa.scaled_dot_product_attention(x, x, x, None, dropout_p)
            fa.layer_norm(x, 16)
    (warning,) = (str(w.message) for w in caught)
    assert device_type in warning
    assert ("fused-attn verify" in warning) is (device_type == "cuda")


def test_the_table_of_devices():
    """The page has the backend of each call, and its number of operations beside that of torch."""
    page = device_table.PAGE.read_text("utf-8")
    assert page == device_table.with_table(page), "run python scripts/device_table.py"
