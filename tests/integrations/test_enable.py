"""fused_attn.enable(): intercepted callers, results, and calls that fall back to torch."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from enable_helpers import counting, taken_over, torch_as_it_was  # noqa: F401
from helpers import DTYPES, assert_like_eager, random_qkv, short
from nn_helpers import assert_equal_in_float64, perturb, randn, random_mask, run
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as early_bound

import fused_attn
from fused_attn import functional
from fused_attn.base import philox

BATCH, HEADS, LEN_Q, LEN_K, DIM = 2, 4, 5, 7, 8
FULL = (BATCH, HEADS, LEN_Q, LEN_K)
MASK_SHAPES = [
    (LEN_Q, LEN_K),
    (LEN_Q, 1),
    (HEADS, 1, LEN_K),
    (BATCH, 1, 1, LEN_K),
    (1, HEADS, LEN_Q, LEN_K),
    FULL,
]


def qkv(dtype=torch.float64):
    return [randn(BATCH, HEADS, length, DIM, dtype=dtype) for length in (LEN_Q, LEN_K, LEN_K)]


def with_gradients(*tensors, **options):
    """Return the output of torch's SDPA, and the gradients of inputs that require grad."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    out = F.scaled_dot_product_attention(*leaves, **options)
    out.backward(torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape))
    grads = {f"grad {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    return {"out": out.detach(), **grads}


def agrees_with_torch(*tensors, calls=1, **options):
    """Assert that fused_attn computes `calls` calls, and that float64 results equal torch's."""
    expected = with_gradients(*tensors, **options)
    with taken_over() as computed:
        actual = with_gradients(*tensors, **options)
    assert len(computed) == calls
    assert_equal_in_float64(actual, expected)


def torch_function(**options):
    """Return function(backend) for `assert_like_eager` that calls torch's SDPA within enabled()."""

    def of(backend):
        def call(query, key, value, bias=None):
            args = (query, key, value, bias)
            if backend == "eager":
                return (functional.scaled_dot_product_attention(*args, **options, backend="eager"),)
            with taken_over() as computed:
                out = F.scaled_dot_product_attention(*args, **options)
            assert len(computed) == 1
            return (out,)

        return call

    return of


# ---- callers ------------------------------------------------------------------------------------


@torch.jit.script
def scripted(query: torch.Tensor):
    return F.scaled_dot_product_attention(query, query, query)


CALLERS = {
    "module attribute": lambda q: F.scaled_dot_product_attention(q, q, q),
    "early-bound": lambda q: early_bound(q, q, q),
    "binding": lambda q: torch._C._nn.scaled_dot_product_attention(q, q, q),
    "torch.ops": lambda q: torch.ops.aten.scaled_dot_product_attention(q, q, q),
    "TorchScript's C++": scripted,
}


@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
def test_callers(call):
    query = torch.randn(BATCH, HEADS, LEN_Q, DIM)
    expected = call(query)
    with taken_over() as computed:
        out = call(query)
    assert len(computed) == 1
    torch.testing.assert_close(out, expected)
    with counting() as computed:
        call(query)
    assert not computed, "a call after the block is intercepted"


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch._C._AutoDispatchBelowAutograd]
)
def test_without_autograd(mode):
    """Calls without autograd, or below it as in kernels of custom ops, are intercepted."""
    query, key, value = qkv()
    with mode():
        expected = F.scaled_dot_product_attention(query, key, value)
        with taken_over() as computed:
            out = F.scaled_dot_product_attention(query, key, value)
    assert len(computed) == 1 and not out.requires_grad
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("attn_mask", [None, "bool", "learned"])
def test_multihead_attention(attn_mask, training):
    module = perturb(torch.nn.MultiheadAttention(24, 3, batch_first=True).double())
    module.train(training)
    x = randn(BATCH, LEN_Q, 24)
    mask = None if attn_mask is None else random_mask(attn_mask, LEN_Q, LEN_Q)
    padding = torch.tensor([[False] * LEN_Q, [False] * 3 + [True] * 2])
    options = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": False}
    expected = run(module, (x, x, x), options)
    with taken_over() as computed:
        actual = run(module, (x, x, x), options)
    assert len(computed) == 1
    assert_equal_in_float64(actual, expected)


def test_inference_path_of_multihead_attention():
    """torch's C++ fast path bypasses enable(); with that path disabled, the call is intercepted."""
    # An odd number of heads would disable this path.
    module = torch.nn.MultiheadAttention(24, 4, batch_first=True).eval()
    x = torch.randn(BATCH, LEN_Q, 24)
    with torch.no_grad(), taken_over() as computed:
        module(x, x, x, need_weights=False)
        assert not computed
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            module(x, x, x, need_weights=False)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert len(computed) == 1


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_masks(kind, shape):
    if kind == "bool":
        mask = torch.rand(shape) < 0.7
        mask[..., 0] = True
    else:
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=kind == "learned")
    agrees_with_torch(*qkv(), mask)


def test_masks_are_not_copied():
    mask = torch.ones(BATCH, 1, 1, LEN_K, dtype=torch.bool)
    with taken_over() as computed:
        F.scaled_dot_product_attention(*qkv(), mask)
    assert computed[0][1] is mask


def test_float32_mask_with_16_bit_query():
    tensors = random_qkv(2, 4, 4, 33, 70, 16) | {"bias": torch.randn(4, 33, 70)}
    assert_like_eager(torch_function(), tensors, torch.bfloat16, "cpp")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True, "is_causal": True}],
    ids=str,
)
def test_numerics(options, dtype):
    heads_kv = 2 if "enable_gqa" in options else 4
    tensors = random_qkv(2, 4, heads_kv, 33, 70, 16, 24)
    assert_like_eager(torch_function(**options), tensors, dtype, "cpp")


@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 4)], ids=["2-D", "3-D", "5-D"])
def test_other_ranks(leading):
    tensors = [randn(*leading, seqlen, DIM) for seqlen in (LEN_Q, LEN_K, LEN_K)]
    agrees_with_torch(*tensors)
    agrees_with_torch(*tensors, random_mask("learned", LEN_Q, LEN_K))


def test_fully_masked_rows_are_zero():
    query, key, value = qkv()
    bias = torch.zeros(LEN_Q, LEN_K, dtype=torch.float64)
    bias[2] = float("-inf")
    bias.requires_grad_()
    with taken_over():
        results = with_gradients(query, key, value, bias)
    assert (results["out"][:, :, 2] == 0.0).all()
    assert all(t.isfinite().all() for t in results.values())


@pytest.mark.small_calls
def test_nan_query_yields_nan():
    """A NaN query yields NaN, even over fewer than 16 keys, where torch's kernel returns 0."""
    query, key = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8)
    query[0, 0, 1] = float("nan")
    with torch.no_grad(), fused_attn.enabled():
        out = F.scaled_dot_product_attention(query, key, key)
    assert out.isnan().any(-1).tolist() == [[[False, True, False]]]


def test_dropout():
    query = torch.zeros(1, 2, 64, 8)
    value = torch.eye(64).expand(1, 2, 64, 64)  # so that the output equals the weights

    def call():
        return F.scaled_dot_product_attention(query, query, value, dropout_p=0.25)

    with taken_over() as computed:
        torch.manual_seed(3)
        first, second = call(), call()
        torch.manual_seed(3)
        again = call()
        torch.manual_seed(3)
        seed = philox.new_seed(torch.device("cpu"))
    assert [p for p, _ in computed] == [0.25] * 3
    assert torch.equal(first, again) and not torch.equal(first, second)
    keep = philox.attention_keep(seed, 0.25, 1, 2, 64, 64)
    assert torch.equal(first != 0.0, keep)
    torch.testing.assert_close(first, keep / (64 * 0.75))
    assert abs(keep.float().mean() - 0.75) < 0.02


def test_autocast_is_that_of_torch():
    query, key, value = qkv(torch.float32)
    bias = torch.randn(LEN_Q, LEN_K, requires_grad=True)
    with taken_over() as computed:
        with torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(query, key, value, bias)
        cast = [t.bfloat16() for t in (query, key, value, bias)]
        expected = F.scaled_dot_product_attention(*cast)
    assert len(computed) == 2 and out.dtype == torch.bfloat16
    assert computed[0][1].dtype == torch.bfloat16  # torch casts the mask too
    assert torch.equal(out, expected)
    out.sum().backward()
    assert bias.grad.dtype == query.grad.dtype == torch.float32


def test_second_order():
    tensors = [t.detach()[:1, :1, :3].requires_grad_() for t in qkv()]
    tensors.append(torch.randn(3, 3, dtype=torch.float64, requires_grad=True))
    with taken_over() as computed:
        assert torch.autograd.gradcheck(F.scaled_dot_product_attention, tensors)
        assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, tensors)
    assert computed


# ---- calls that fall back to torch --------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def nested(layout):
    rows = [torch.linspace(-1, 1, length * 16).view(length, 2, 8) for length in (3, 5)]
    if layout == torch.strided:
        return torch.nested.nested_tensor([row.transpose(0, 1) for row in rows])
    return torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)


def attend(query, **options):
    return F.scaled_dot_product_attention(query, query, query, **options)


def tangent(query):
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        out = attend(forward_ad.make_dual(query, torch.ones_like(query)))
        return forward_ad.unpack_dual(out).tangent


def only(*backends):
    def call(query):
        with sdpa_kernel(list(backends)):
            return attend(query)

    return call


def causal_and_masked(query):
    try:
        return attend(query, attn_mask=torch.zeros(LEN_Q, LEN_Q), is_causal=True)
    except RuntimeError as error:  # torch 2.14 rejects the combination
        assert "attn_mask should not be set" in str(error)  # noqa: PT017
        return torch.zeros(())


def on(backend):
    def call(query):
        with fused_attn.use_backend(backend):
            return attend(query)

    return call


UNSUPPORTED_CALLS = {
    "vmap": lambda q: torch.vmap(attend)(q),
    "grad": lambda q: torch.func.grad(lambda t: attend(t).sum())(q),
    "vjp": lambda q: torch.func.vjp(attend, q)[1](q)[0],
    "forward mode": tangent,
    "nested": lambda q: attend(nested(torch.strided)).to_padded_tensor(0.0),
    "jagged": lambda q: attend(nested(torch.jagged)).values(),
    "subclass": lambda q: attend(q.as_subclass(Subclass)).as_subclass(torch.Tensor),
    "causal and mask": causal_and_masked,
    "sdpa_kernel(MATH)": only(SDPBackend.MATH),
    "backend eager": on("eager"),
    "backend of a GPU": on("triton"),
}


@pytest.mark.parametrize("call", UNSUPPORTED_CALLS.values(), ids=UNSUPPORTED_CALLS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_falls_back(call):
    query = torch.randn(BATCH, HEADS, LEN_Q, DIM)
    expected = call(query)
    with taken_over() as computed:
        out = call(query)
    assert not computed
    assert torch.equal(out, expected)


def test_fallback_is_differentiable():
    with sdpa_kernel(SDPBackend.MATH):
        agrees_with_torch(*qkv(), calls=0)


def test_meta_device():
    with taken_over() as computed:
        out = attend(torch.empty(BATCH, HEADS, LEN_Q, DIM, device="meta"))
    assert not computed and out.shape == (BATCH, HEADS, LEN_Q, DIM)


def test_sdpa_kernel_flash_attention_is_intercepted():
    with taken_over() as computed:
        only(SDPBackend.FLASH_ATTENTION)(torch.randn(BATCH, HEADS, LEN_Q, DIM))
    assert len(computed) == 1


INVALID_CALLS = {
    "types": lambda q: F.scaled_dot_product_attention(q, q.double(), q),
    "head_dim": lambda q: F.scaled_dot_product_attention(q, q[..., :4], q),
    "heads": lambda q: F.scaled_dot_product_attention(q, q[:, :3], q[:, :3]),
    "gqa": lambda q: F.scaled_dot_product_attention(q, q[:, :3], q[:, :3], enable_gqa=True),
    "1-D": lambda q: F.scaled_dot_product_attention(q[0, 0, 0], q, q),
    "0-D": lambda q: F.scaled_dot_product_attention(q[0, 0, 0, 0], q, q),
    "integers": lambda q: attend(q.int()),
    "mask shape": lambda q: attend(q, attn_mask=torch.zeros(3, LEN_Q, LEN_Q)),
    "int mask": lambda q: attend(q, attn_mask=torch.zeros(LEN_Q, LEN_Q).long()),
    "16-bit mask": lambda q: attend(q, attn_mask=torch.zeros(LEN_Q, LEN_Q).bfloat16()),
    "float64 mask": lambda q: attend(q, attn_mask=torch.zeros(LEN_Q, LEN_Q).double()),
    "probability": lambda q: attend(q, dropout_p=2.0),
    "no number": lambda q: attend(q, dropout_p="much"),
}


@pytest.mark.parametrize("call", INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_invalid_calls_raise_the_errors_of_torch(call):
    query = torch.randn(BATCH, HEADS, LEN_Q, DIM)
    messages = []
    for context in (contextlib.nullcontext(), fused_attn.enabled()):
        with context, pytest.raises((RuntimeError, TypeError)) as caught:
            call(query)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]
