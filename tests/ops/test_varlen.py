"""Packed sequences give the same results as a padded batch."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DTYPES,
    FLOAT64_BACKENDS,
    ONE_16_BIT_TYPE,
    assert_like_eager,
    assert_outputs_like_eager,
    device_of,
    drawn,
    leaves_of,
    most_exact,
    short,
)
from mask_cases import FIELDS, MASKS, OTHER_MASKS

from fused_attn import functional as F
from fused_attn import masks, varlen_attention

LENGTHS_Q = (40, 0, 3, 150)
LENGTHS_K = (131, 7, 0, 64)


def cu_seqlens(lengths, dtype=torch.int32):
    return torch.tensor((0, *lengths), dtype=dtype).cumsum(0, dtype=dtype)


def packed(lengths_q, lengths_k, heads=4, heads_kv=2, dim=24, dim_v=40):
    generator = drawn(3)

    def make(rows, heads, dim):
        return torch.randn(rows, heads, dim, generator=generator)

    return {
        "query": make(sum(lengths_q), heads, dim),
        "key": make(sum(lengths_k), heads_kv, dim),
        "value": make(sum(lengths_k), heads_kv, dim_v),
    }


def varlen(lengths_q, lengths_k, mask=None, longest=None, **options):
    """Return function(backend)(query, key, value, bias=None) for `assert_like_eager`.

    Calls have a mask or a bias, not both.
    """
    longest = (max(lengths_q), max(lengths_k)) if longest is None else longest

    def of(backend):
        def call(query, key, value, bias=None):
            where = (cu_seqlens(n).to(query.device) for n in (lengths_q, lengths_k))
            attn_mask = bias if mask is None else mask.to(query.device)
            return varlen_attention(
                query, key, value, *where, *longest, attn_mask, return_lse=True, backend=backend,
                **options,
            )  # fmt: skip

        return call

    return of


def padded(packed, lengths):
    """Return packed rows as (batch, heads, longest, dim), padded with NaN."""
    parts = packed.split(list(lengths))
    return torch.nn.utils.rnn.pad_sequence(parts, True, torch.nan).transpose(1, 2)


@OTHER_MASKS
@pytest.mark.thinned("FIELDS covers the kernels' code paths", name=set(MASKS) - set(FIELDS))
@ONE_16_BIT_TYPE
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype, backend):
    mask = MASKS[name](4, 4, max(LENGTHS_Q), max(LENGTHS_K))
    assert_like_eager(
        varlen(LENGTHS_Q, LENGTHS_K, mask), packed(LENGTHS_Q, LENGTHS_K), dtype, backend
    )


@pytest.mark.thinned(
    "covered by dropout", options=[{"is_causal": True}, {"softcap": 2.0, "scale": 0.4}]
)
@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"softcap": 2.0, "scale": 0.4}],
    ids=str,
)  # fmt: skip
def test_is_the_padded_batch(options, backend):
    """Results and gradients are bitwise identical to those of the padded batch."""
    query, key, value = leaves_of(packed(LENGTHS_Q, LENGTHS_K).values(), torch.float32, backend)
    torch.manual_seed(0)
    out, lse = varlen(LENGTHS_Q, LENGTHS_K, **options)(backend)(query, key, value)
    torch.manual_seed(0)
    whole = F.scaled_dot_product_attention(
        padded(query, LENGTHS_Q), padded(key, LENGTHS_K), padded(value, LENGTHS_K),
        masks.padding(LENGTHS_K, LENGTHS_Q),
        enable_gqa=True, return_lse=True, backend=backend, **options,
    )  # fmt: skip
    rows = (torch.arange(max(LENGTHS_Q)) < torch.tensor(LENGTHS_Q)[:, None]).to(out.device)
    expected, expected_lse = (t.transpose(1, 2)[rows] for t in whole)
    got = out, lse.mT, *torch.autograd.grad(out.sum(), (query, key, value))
    want = expected, expected_lse, *torch.autograd.grad(whole[0].sum(), (query, key, value))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4, 1, 1, 160), (1, 4, 170, 1), (4, 4, 170, 160)])
def test_bias_gradient(shape, backend):
    tensors = packed(LENGTHS_Q, LENGTHS_K)
    tensors["bias"] = torch.randn(shape, generator=drawn(1))
    function = varlen(LENGTHS_Q, LENGTHS_K, longest=(170, 160))
    assert_like_eager(function, tensors, torch.float32, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_isas(isa, dtype):
    function = varlen(LENGTHS_Q, LENGTHS_K, is_causal=True, dropout_p=0.2)
    assert_like_eager(function, packed(LENGTHS_Q, LENGTHS_K), dtype, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("mask", [None, masks.causal(align="bottom_right")], ids=["none", "causal"])
def test_decode(mask, dtype, backend):
    """Decoding is within the numerics contract if lengths of packed sequences differ or are 0."""
    lengths_q, lengths_k = (1, 3, 0, 2, 5), (700, 300, 50, 0, 7)
    tensors = packed(lengths_q, lengths_k, heads=8)
    assert_outputs_like_eager(varlen(lengths_q, lengths_k, mask), tensors, dtype, backend)


def small_call(backend):
    """Return a function of query, key and value, and small tensors for it."""
    there = device_of(backend)
    where = (cu_seqlens((3, 2)).to(there), cu_seqlens((4, 5), torch.int64).to(there), 3, 5)

    def call(query, key, value):
        return varlen_attention(query, key, value, *where, is_causal=True, backend=backend)

    tensors = packed((3, 2), (4, 5), 2, 1, 4, 4).values()
    return call, leaves_of(tensors, most_exact(backend), backend)


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
def test_double_backward(backend):
    call, leaves = small_call(backend)
    assert torch.autograd.gradcheck(call, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend):
    call, leaves = small_call(backend)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), call(*leaves))


def cached_spec(mask):
    """Return the MaskSpec for packed sequences that a mask has cached."""
    (spec,) = (entry.value for (key, *_), entry in mask.memo.items() if key[:2] == ("spec", False))
    return spec


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_a_mask_keeps_what_is_derived(backend):
    """The MaskSpec of a mask is cached, and recomputed if cu_seqlens change in place."""
    there = device_of(backend)
    tensors = [t.to(there) for t in packed((30, 50), (30, 50)).values()]
    where = [cu_seqlens((30, 50)).to(there) for _ in "qk"]
    mask = masks.dense(torch.rand(60, 60, device=there) > 0.5)

    def run(mask):
        return varlen_attention(*tensors, *where, 60, 60, mask, backend=backend)

    first = run(mask)
    spec = cached_spec(mask)
    assert torch.equal(run(mask), first)
    assert cached_spec(mask) is spec
    where[0][1] = where[1][1] = 25
    assert torch.equal(run(mask), run(masks.dense(mask.tensors()[0])))
    assert cached_spec(mask) is not spec


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_nothing_is_differentiable(backend):
    """A batch whose sequences are all empty has an empty gradient."""
    empty = torch.zeros(0, 2, 8, device=device_of(backend), requires_grad=True)
    ends = cu_seqlens([0]).to(empty.device)
    varlen_attention(empty, empty, empty, ends, ends, 0, 0, backend=backend).sum().backward()
    assert empty.grad is not None


def test_nothing_at_all():
    """A batch without sequences has an empty output."""
    empty, ends = torch.zeros(0, 2, 8), cu_seqlens([])
    assert varlen_attention(empty, empty, empty, ends, ends, 0, 0).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 3])}, ValueError, "end with the number of rows, 5, got"),
        ({"cu_seqlens_q": torch.tensor([0, 6, 5])}, ValueError, r"in \[0, 4\], got \[-1, 6\]"),
        ({"cu_seqlens_q": torch.tensor([0.0, 5.0])}, TypeError, "int32 or int64 tensor"),
        ({"cu_seqlens_k": torch.tensor([[0, 6]])}, ValueError, r"shape \(batch \+ 1,\)"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 6])}, ValueError, "cu_seqlens_k must have shape"),
        ({"max_seqlen_k": 6.0}, TypeError, "max_seqlen_k must be an int, got float"),
        ({"max_seqlen_q": -5}, ValueError, "max_seqlen_q must be >= 0, got -5"),
        ({"max_seqlen_k": 5}, ValueError, r"in \[0, 5\], got \[6, 6\]"),
        ({"query": torch.zeros(1, 5, 2, 8)}, ValueError, "query must have 3 dimensions"),
        ({"value": torch.zeros(6, 1, 8)}, ValueError, "value must have num_heads_kv 2"),
        ({"key": torch.zeros(6, 3, 8), "value": torch.zeros(6, 3, 8)}, ValueError, "must divide"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    arguments = {
        "query": torch.zeros(5, 2, 8),
        "key": torch.zeros(6, 2, 8),
        "value": torch.zeros(6, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 5]),
        "cu_seqlens_k": torch.tensor([0, 6]),
        "max_seqlen_q": 4 if "cu_seqlens_q" in change else 5,
        "max_seqlen_k": 6,
    }
    with pytest.raises(error, match=message):
        varlen_attention(**(arguments | change))
