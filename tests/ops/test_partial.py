"""Partial results (AttentionOptions.partial) are the ordinary results before rounding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import BACKENDS, DTYPES, Reference, deterministic, device_of, drawn

from fused_attn.backends import get_backend, problem_of, reference, select
from fused_attn.backends.flash import _choice as flash_refusals
from fused_attn.call.attention import AttentionBackward, AttentionCall, AttentionOptions
from fused_attn.call.options import with_options
from fused_attn.distributed.merged import MergedOutputs
from fused_attn.masks.spec import MaskSpec, with_summaries

# batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
SHAPES = {
    "training": (2, 4, 2, 67, 93, 40, 24),
    "one query": (2, 4, 2, 1, 93, 40, 24),
    "one query, many keys": (1, 4, 2, 1, 700, 40, 24),  # several KV splits
    "odd widths": (1, 2, 1, 35, 50, 37, 23),
    "wide heads": (1, 2, 1, 20, 33, 160, 136),
}


def problem(backend, dtype, shape, dropout_p=0.0):
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    device, generator = device_of(backend), drawn(3)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    seed = torch.tensor(7, device=device) if dropout_p else None
    call = AttentionCall(
        normal(batch, heads, seqlen_q, head_dim),
        normal(batch, heads_kv, seqlen_k, head_dim),
        normal(batch, heads_kv, seqlen_k, head_dim_v),
        MaskSpec(band_lo=-40, band_hi=max(5, seqlen_k - seqlen_q)),
        AttentionOptions(0.2, 0.0, dropout_p, seed),
    )
    return call, normal(batch, heads, seqlen_q, head_dim_v)


def assert_unrounded(backend, dtype, shape, dropout_p=0.0, for_backward=True):
    """Assert that partial results round to ordinary results, with rounding error out_residual."""
    kernels = get_backend(backend)
    call, grad_out = problem(backend, dtype, shape, dropout_p)
    partial = with_options(call, partial=True)
    whole = kernels.attention_fwd(call, for_backward, True)
    part = kernels.attention_fwd(partial, for_backward, True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert part.out.dtype == wide and part.out.shape == whole.out.shape
    torch.testing.assert_close(part.out.to(dtype), whole.out, rtol=0, atol=0)
    torch.testing.assert_close(part.lse, whole.lse, rtol=0, atol=0)
    if dtype.itemsize == 2:
        assert not torch.equal(part.out, part.out.to(dtype).to(wide)), "out is rounded"
    if not for_backward:
        return
    torch.testing.assert_close(part.lse_residual, whole.lse_residual, rtol=0, atol=0)
    if dtype.itemsize == 2:
        assert part.out_residual is None or part.out_residual.numel() == 0
        bits = whole.out.float().view(torch.int32) + whole.out_residual.int()
        # A tie has a rounding error of 2^15 units, one more than out_residual can store. Rounding
        # errors of float16 subnormals are much larger, so they are excluded.
        far = (part.out.view(torch.int32) - bits).abs() > 1
        assert not bool(far[whole.out.abs() > 2**-13].any())
    # Atomic additions on a GPU would make two runs differ.
    with deterministic(part.out.is_cuda):
        grads = kernels.attention_bwd(AttentionBackward(call, whole, grad_out, None, False))
        parts = kernels.attention_bwd(AttentionBackward(partial, whole, grad_out, None, False))
    for name in ("query", "key", "value"):
        got, expected = getattr(parts, name), getattr(grads, name)
        assert got.dtype == wide
        torch.testing.assert_close(got.to(dtype), expected, rtol=0, atol=0, msg=name)
        if dtype.itemsize == 2:
            assert not torch.equal(got, got.to(dtype).to(wide)), f"{name} is rounded"


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_results_are_unrounded(backend, dtype, dropout_p):
    assert_unrounded(backend, dtype, SHAPES["training"], dropout_p)


@pytest.mark.parametrize("name", ["one query", "one query, many keys"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_results_of_one_query(backend, dtype, name):
    assert_unrounded(backend, dtype, SHAPES[name], for_backward=False)


@pytest.mark.parametrize("name", ["odd widths", "wide heads"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_results_of_other_widths(backend, name):
    assert_unrounded(backend, torch.bfloat16, SHAPES[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_results_in_deterministic_mode(backend):
    with deterministic():
        assert_unrounded(backend, torch.bfloat16, SHAPES["training"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_results_on_each_instruction_set(isa, dtype):
    assert_unrounded("cpp", dtype, SHAPES["training"])
    assert_unrounded("cpp", dtype, (1, 2, 2, 300, 200, 64, 64))
    assert_unrounded("cpp", dtype, SHAPES["one query"], for_backward=False)


@pytest.mark.parametrize("name", ["sdpa", "flex", "flash"])
def test_backends_without_partial_results_say_so(name):
    """Backends without partial results name them as the reason why they refuse a call."""
    call, _ = problem("cpp", torch.float32, SHAPES["training"])
    # The check for the CPU, which precedes all others of flash, is skipped.
    reasons_of = flash_refusals if name == "flash" else get_backend(name).unsupported
    for partial in (True, False):
        reasons = reasons_of(problem_of(with_options(call, partial=partial)))
        assert any("partial results" in reason for reason in reasons) == partial
    assert select(problem_of(with_options(call, partial=True))).name == "cpp"


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *itertools.product([(67, 93), (1, 93)], [torch.float32, torch.bfloat16]),
        ((67, 1), torch.float32),  # not in 16 bits, where these sums over the keys cancel
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_gradients_of_parts_add_up(backend, dtype, sizes):
    """Bias gradients of parts of the keys add up to the bias gradient of all keys.

    Unlike with all keys, the rows of dS of one part do not sum to the gradient of lse.
    """
    kernels = get_backend(backend)
    call, grad_out = problem(backend, dtype, SHAPES["training"])
    bias = torch.randn(1, 4, *sizes, generator=drawn(4)).to(call.query.device)
    call = replace(call, mask=MaskSpec(bias=bias))
    merged = MergedOutputs(call.query, call.value)
    parts = []
    for keys in (slice(0, 40), slice(40, 93)):
        part_bias = bias if sizes[1] == 1 else bias[..., keys].contiguous()
        part = replace(
            with_options(call, partial=True),
            key=call.key[:, :, keys], value=call.value[:, :, keys],
            mask=with_summaries(MaskSpec(bias=part_bias), kernels.tile_summary),
        )  # fmt: skip
        parts.append(part)
        merged.add(kernels.attention_fwd(part, True, True), slice(None))
    outputs = merged.finish(dtype).without_none()
    grad_lse = torch.randn(outputs.lse.shape, generator=drawn(5)).to(bias.device)
    backwards = (AttentionBackward(part, outputs, grad_out, grad_lse, True) for part in parts)
    grads = [kernels.attention_bwd(backward).bias for backward in backwards]
    assert all(grad.dtype == torch.float32 for grad in grads)
    got = sum(grads) if sizes[1] == 1 else torch.cat(grads, -1)

    def eager(dtype):
        """Return the bias gradient of eager attention with operands in a dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        leaf = bias.to(wide).cpu().requires_grad_()
        tensors = {n: getattr(call, n).to("cpu", dtype) for n in ("query", "key", "value")}
        outputs = reference.attention(replace(call, mask=MaskSpec(bias=leaf), **tensors))
        output_grads = grad_out.to("cpu", dtype), grad_lse.to("cpu", wide)
        return {"grad_bias": torch.autograd.grad(outputs, leaf, output_grads)[0]}

    (finding,) = Reference(eager, dtype).findings({"grad_bias": got.cpu()})
    assert finding.ok, str(finding)
