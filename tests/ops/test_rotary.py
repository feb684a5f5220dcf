"""rotary_embedding and its gradients, and the rotation of keys that decode_attention appends."""

from __future__ import annotations

import pickle

import numpy
import pytest
import torch
from helpers import DTYPES, assert_like_eager, drawn, short, use_threads

import fused_attn
from fused_attn import functional as F
from fused_attn import use_backend

BATCH, HEADS, SEQLEN = 2, 3, 7
POSITIONS = torch.tensor([[4, 8, 0, 1, 2, 2, 9], [7, 7, 7, 3, 1, 0, 5]])


def by_hand(x, cos, sin, positions=None, interleaved=False):
    """Apply equation 34 of RoFormer to each dimension: x * cos + partner * (+-sin)."""
    head_dim, width = x.shape[-1], cos.shape[-1]
    rotary_dim = head_dim if width == head_dim else 2 * width
    dims = torch.arange(rotary_dim)
    half = rotary_dim // 2
    partner = dims ^ 1 if interleaved else (dims + half) % max(rotary_dim, 1)
    pair = dims // 2 if interleaved else dims % max(half, 1)
    sign = torch.where(partner > dims, -1.0, 1.0).to(x.dtype)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    elif cos.dim() == 2:
        cos, sin = cos[: x.shape[2]], sin[: x.shape[2]]
    columns = dims if width == head_dim else pair
    cos, sin = (table.index_select(-1, columns).unsqueeze(-3) for table in (cos, sin))
    rotated = x.index_select(-1, dims) * cos + x.index_select(-1, partner) * (sin * sign)
    return torch.cat([rotated, x[..., rotary_dim:]], -1)


def rotary(cos, sin, positions=None, interleaved=False):
    """Return function(backend)(input) for `assert_like_eager`."""

    def of(backend):
        def call(input):
            function = by_hand if backend == "eager" else F.rotary_embedding
            tables = cos.to(input.dtype), sin.to(input.dtype)
            return (function(input, *tables, positions=positions, interleaved=interleaved),)

        return call

    of.key = pickle.dumps((cos, sin, positions, interleaved))
    return of


def tables_of(shape):
    """Return independent random tables cos and sin, whose values are exact in 16 bits."""
    return (torch.randint(-64, 65, (2, *shape), generator=drawn(5)) / 64).unbind()


@pytest.mark.sampled(
    "tables differ only in their rows", tables=["shared", "long", "token", "one sequence"],
    head_dim=[64, 6, 34],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbors"])
@pytest.mark.parametrize(("head_dim", "width"), [(64, 32), (64, 64), (40, 7), (6, 6), (34, 17)])
@pytest.mark.parametrize("tables", ["shared", "long", "token", "one sequence", "positions"])
def test_rotary(tables, head_dim, width, interleaved, dtype, isa):
    leading = {"shared": (SEQLEN,), "token": (BATCH, SEQLEN), "one sequence": (1, SEQLEN)}
    cos, sin = tables_of((*leading.get(tables, (10,)), width))
    positions = POSITIONS if tables == "positions" else None
    x = torch.randn(BATCH, HEADS, SEQLEN, head_dim, generator=drawn(1))
    assert_like_eager(rotary(cos, sin, positions, interleaved), {"input": x}, dtype, "cpp")


@pytest.mark.parametrize("layout", ["heads last", "slice", "last stride", "broadcast", "negated"])
def test_layouts(layout):
    x = torch.randn(BATCH, SEQLEN, HEADS, 32, generator=drawn(2))
    view = {
        "heads last": x.transpose(1, 2),
        "slice": torch.cat([x, x, x], -1)[..., 32:64].transpose(1, 2),
        "last stride": x.mT.contiguous().mT.transpose(1, 2),
        "broadcast": x[:, :, :1].expand(-1, -1, HEADS, -1).transpose(1, 2),
        "negated": torch.complex(x, x).conj().imag.transpose(1, 2),
    }[layout]
    cos, sin = tables_of((SEQLEN, 16))
    got = F.rotary_embedding(view, cos, sin)
    torch.testing.assert_close(got, by_hand(view.contiguous(), cos, sin))
    if layout == "heads last":
        assert got.stride() == view.stride()


def test_tables_of_other_types():
    """Tables in float32 are not rounded to the dtype of the input."""
    x = torch.randn(1, 2, SEQLEN, 16, dtype=torch.bfloat16, generator=drawn(3))
    table = torch.full((SEQLEN, 8), 0.70711)
    exact = by_hand(x.double(), table.double(), table.double()).bfloat16()
    for cos in (table, table.double()):
        assert torch.equal(F.rotary_embedding(x, cos, table), exact)
    assert F.rotary_embedding(x, table, table.half()).dtype == torch.bfloat16


def test_gradients_of_higher_order():
    cos, sin = (t.double() for t in tables_of((SEQLEN, 5)))
    x = torch.randn(1, 2, SEQLEN, 16, dtype=torch.float64, requires_grad=True)
    for interleaved in (False, True):
        call = rotary(cos, sin, None, interleaved)("cpp")
        assert torch.autograd.gradcheck(call, x)
        assert torch.autograd.gradgradcheck(call, x)
    cos.requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: F.rotary_embedding(*a), (x, cos, sin))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads):
    x = torch.randn(2, 5, 33, 24, generator=drawn(4))
    cos, sin = tables_of((33, 12))
    with use_threads(threads):
        got = F.rotary_embedding(x, cos, sin)
    torch.testing.assert_close(got, by_hand(x, cos, sin))


def test_intercepted_calls():
    """Results under torch.compile, vmap and batched gradients equal those of plain calls."""
    x = torch.randn(2, 3, SEQLEN, 16, generator=drawn(6), requires_grad=True)
    cos, sin = tables_of((SEQLEN, 8))
    expected = F.rotary_embedding(x, cos, sin)
    compiled = torch.compile(F.rotary_embedding, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cos, sin), expected)
    mapped = torch.func.vmap(F.rotary_embedding, in_dims=(1, None, None))
    torch.testing.assert_close(mapped(x[:, :, None], cos, sin).transpose(0, 1)[:, :, 0], expected)

    def total(x):
        return F.rotary_embedding(x, cos, sin).sum((0, 1, 2))

    jacobians = (torch.autograd.functional.jacobian(total, x, vectorize=v) for v in (True, False))
    torch.testing.assert_close(*jacobians)


def test_empty_tensors_and_other_backends():
    cos, sin = tables_of((SEQLEN, 8))
    assert F.rotary_embedding(torch.zeros(0, 2, SEQLEN, 16), cos, sin).shape == (0, 2, SEQLEN, 16)
    x = torch.randn(1, 2, SEQLEN, 16)
    assert torch.equal(F.rotary_embedding(x, cos[:, :0], sin[:, :0]), x)
    with use_backend("eager"):
        torch.testing.assert_close(F.rotary_embedding(x, cos, sin), by_hand(x, cos, sin))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": torch.zeros(2, 7, 16)}, ValueError, "input must have 4 dimensions"),
        ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
        ({"cos": torch.zeros(7, 9)}, ValueError, "at most 8 .* or of 16, got"),
        ({"cos": torch.zeros(7)}, ValueError, "cos must have shape"),
        ({"cos": torch.zeros(6, 8), "sin": torch.zeros(6, 8)}, ValueError, "7 or more, width"),
        ({"cos": torch.zeros(3, 7, 8), "sin": torch.zeros(3, 7, 8)}, ValueError, "2 or 1, 7"),
        ({"sin": torch.zeros(7, 4)}, ValueError, r"sin must have shape \(7, 8\)"),
        ({"cos": torch.zeros(7, 8).int()}, TypeError, "cos must be float32"),
        ({"positions": torch.full((7,), 7)}, ValueError, r"in \[0, 6\] .*, got \[7, 7\]"),
        ({"positions": torch.full((7,), -1)}, ValueError, r"got \[-1, -1\]"),
        ({"positions": torch.zeros(7)}, TypeError, "positions must be an int32 or int64 tensor"),
        ({"positions": torch.zeros(3, 7).int()}, ValueError, r"must have shape \(2, 7\) or \(7,\)"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    cos, sin = tables_of((7, 8))
    arguments = {"input": torch.zeros(2, 3, 7, 16), "cos": cos, "sin": sin} | change
    with pytest.raises(error, match=message):
        F.rotary_embedding(**arguments)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 2), (0, 0)], ids=str)
@pytest.mark.parametrize("seqlen_new", [0, 1, 4])
@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_rotated_cache(masked, paged, seqlen_new, lengths):
    """decode_attention with rotary tables equals a call with rotated query and key."""
    if not seqlen_new and not min(lengths):
        pytest.skip("reason: no keys at all")
    draw = drawn(8)
    shape = (8, 2, 3, 16) if paged else (2, 2, 12, 16)
    caches = [torch.randn(shape, generator=draw) for _ in range(2)]
    expected_caches = [cache.clone() for cache in caches]
    count = max(seqlen_new, 1)
    query = torch.randn(2, 4, count, 16, generator=draw)
    key, value = torch.randn(2, 2, 2, seqlen_new, 16, generator=draw)
    cos, sin = tables_of((12, 8))
    options = {
        "cache_lengths": list(lengths),
        "block_table": torch.tensor([[3, 0, 6, 1], [2, 7, 5, 4]]) if paged else None,
        "attn_mask": fused_attn.masks.alibi([0.5, 0.25, 0.1, 0.2]) if masked else None,
        "value": value,
    }
    positions = torch.tensor(lengths)[:, None] + torch.arange(seqlen_new - count, seqlen_new)
    rotated_key = F.rotary_embedding(key, cos, sin, positions=positions[:, count - seqlen_new :])
    expected = fused_attn.decode_attention(
        F.rotary_embedding(query, cos, sin, positions=positions), *expected_caches,
        key=rotated_key, **options,
    )  # fmt: skip
    versions = [cache._version for cache in caches]
    got = fused_attn.decode_attention(
        query, *caches, key=key, rotary_cos=cos, rotary_sin=sin, **options
    )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(caches, expected_caches, rtol=0, atol=0)
    assert not seqlen_new or all(c._version > v for c, v in zip(caches, versions, strict=True))


@pytest.mark.parametrize("layout", ["last stride", "shared memory", "negated"])
def test_layouts_of_rotated_caches(layout):
    """Rotated keys are stored correctly in caches whose rows are not contiguous."""
    storage = torch.zeros(1, 2, 16, 12, 2)
    cache = {
        "last stride": storage[..., 0].mT,
        "shared memory": torch.zeros(1, 2, 12, 16, 2)[..., 0],
        "negated": torch.zeros(1, 2, 12, 16, dtype=torch.complex64).conj().imag,
    }[layout]
    expected, values = torch.zeros(1, 2, 12, 16), torch.zeros(1, 2, 12, 16)
    query, key = torch.randn(2, 1, 2, 2, 16, generator=drawn(9))
    cos, sin = tables_of((12, 8))
    for keys in (cache, expected):
        fused_attn.decode_attention(
            query, keys, values, cache_lengths=[3], key=key, value=key,
            rotary_cos=cos, rotary_sin=sin,
        )  # fmt: skip
    assert expected.any() and torch.equal(cache, expected)


def test_positions_may_change_before_the_backward():
    memory = numpy.zeros((2, SEQLEN), dtype=numpy.int64)
    x = torch.randn(2, 1, SEQLEN, 16, requires_grad=True, generator=drawn(10))
    cos, sin = tables_of((SEQLEN, 8))
    out = F.rotary_embedding(x, cos, sin, positions=torch.from_numpy(memory))
    memory[:] = 10**12  # torch does not detect this change
    want = F.rotary_embedding(x, cos, sin, positions=torch.zeros(SEQLEN).long())
    assert torch.equal(*(torch.autograd.grad(o.sum(), x)[0] for o in (out, want)))


def test_tensors_without_memory():
    cos, sin = tables_of((SEQLEN, 8))
    with pytest.raises(ValueError, match="must have storage"):
        F.rotary_embedding(torch._efficientzerotensor((1, 2, SEQLEN, 16)), cos, sin)


SHORT, LONG = torch.ones(6, 8), torch.ones(7, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_cos": SHORT}, "given together, got only rotary_cos"),
        ({"rotary_cos": SHORT, "rotary_sin": LONG}, "must have the same shape"),
        ({"rotary_cos": LONG, "rotary_sin": LONG}, "_cos and rotary_sin must not require grad"),
        ({"rotary_cos": SHORT, "rotary_sin": SHORT}, "rotary_cos must have at least 7 rows"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape"),
    ],
)
def test_errors_of_rotated_caches(options, message):
    query, caches = torch.zeros(1, 2, 1, 16), torch.zeros(2, 1, 2, 12, 16)
    options = options | {"key": query + 1, "value": query + 1, "cache_lengths": [6]}
    with pytest.raises(ValueError, match=message):
        fused_attn.decode_attention(query, *caches, **options)
    assert not caches.any()
