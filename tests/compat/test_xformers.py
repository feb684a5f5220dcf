"""fused_attn.compat.xformers, compared with plain formulas in float64."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

import fused_attn.compat.xformers.ops as xops
from fused_attn.call import packed
from fused_attn.compat.xformers.ops import fmha
from fused_attn.compat.xformers.ops.fmha import attn_bias

HEADS, DIM = 4, 8
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
QUERIES, KEYS = [3, 1, 5], [4, 6, 5]
PACKED = [range(4), range(4, 10), range(10, 15)]
PADDED = [range(7 * b, 7 * b + n) for b, n in enumerate(KEYS)]
GAPPY = [range(1, 5), range(5, 11), range(9, 14)]  # the last two sequences share keys
TABLES = torch.tensor([[4, 1, -1], [0, 6, 3], [5, 2, -1]], dtype=torch.int32)
LOGICAL = [[p * 3 + i for p in row if p >= 0 for i in range(3)] for row in TABLES.tolist()]
PAGED = [rows[:n] for rows, n in zip(LOGICAL, KEYS, strict=True)]
LATER = [rows[s : s + n] for rows, s, n in zip(LOGICAL, [2, 3, 1], KEYS, strict=True)]

# Rules: functions of (query, key, number of queries, number of keys) in a sequence that return True
# if the query attends to the key.
ALL = lambda i, j, m, n: True  # noqa: E731
CAUSAL = lambda i, j, m, n: j <= i  # noqa: E731
BOTTOM = lambda i, j, m, n: j <= i + n - m  # noqa: E731
LOCAL = lambda i, j, m, n: i - 2 < j <= i  # noqa: E731
BOTTOM_LOCAL = lambda i, j, m, n: i + n - m - 2 < j <= i + n - m  # noqa: E731
WINDOW = lambda i, j, m, n: -2 <= j - (i + n - m) <= 1  # noqa: E731

blocks = attn_bias.BlockDiagonalMask.from_seqlens(QUERIES, KEYS)
paged = KEYS, TABLES, 3
later = [2, 3, 1], *paged
gappy = [1, 5, 9, 16], KEYS
# Mask, its rule, rows of each sequence's keys (None if not packed), number of key rows.
ROWS = [
    (attn_bias.LowerTriangularMask(), CAUSAL, None, 15),
    (attn_bias.LowerTriangularFromBottomRightMask(), BOTTOM, None, 15),
    (
        attn_bias.LowerTriangularFromBottomRightMask().make_local_attention(2),
        BOTTOM_LOCAL, None, 15,
    ),
    (attn_bias.LocalAttentionFromBottomRightMask(2, 1), WINDOW, None, 15),
    (blocks, ALL, PACKED, 15),
    (blocks.make_causal(), CAUSAL, PACKED, 15),
    (blocks.make_causal_from_bottomright(), BOTTOM, PACKED, 15),
    (blocks.make_local_attention(2), LOCAL, PACKED, 15),
    (blocks.make_local_attention_from_bottomright(2), BOTTOM_LOCAL, PACKED, 15),
    (attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(QUERIES, 7, KEYS), ALL, PADDED, 21),
    (
        attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3] * 3, 7, KEYS),
        BOTTOM, PADDED, 21,
    ),
    (attn_bias.BlockDiagonalGappyKeysMask.from_seqlens(QUERIES, *gappy), ALL, GAPPY, 16),
    (
        attn_bias.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(QUERIES, *gappy),
        BOTTOM, GAPPY, 16,
    ),
    (attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(QUERIES, *paged), ALL, PAGED, 24),
    (
        attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(QUERIES, *paged),
        BOTTOM, PAGED, 24,
    ),
    (attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens(QUERIES, *later), ALL, LATER, 24),
    (
        attn_bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(QUERIES, *later),
        BOTTOM, LATER, 24,
    ),
]  # fmt: skip
MASKS = {type(row[0]).__name__: row for row in ROWS}
WITH_PADDED_KEYS = "BlockDiagonalPaddedKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask"


def lengths_of(mask):
    return mask.q_seqinfo.seqlen_py if isinstance(mask, attn_bias.Blocks) else [9]


def expected_mask(mask, rule, keys, total):
    """Return the (total_q, total_k) mask of a rule, evaluated in loops over all positions."""
    lengths = lengths_of(mask)
    dense = torch.full((sum(lengths), total), float("-inf"))
    start = 0
    for count, rows in zip(lengths, keys or [range(total)], strict=True):
        for i in range(count):
            for j, row in enumerate(rows):
                if rule(i, j, count, len(rows)):
                    dense[start + i, row] = 0.0
        start += count
    return dense


def expected(query, key, value, bias=None, scale=None):
    """Return float64 attention, (batch, seqlen, heads, dim), from the full score matrix."""
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    return (weights @ v).transpose(1, 2)


def assert_close(got, want, dtype=torch.float32):
    eps = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(got.double(), want.double(), rtol=eps, atol=eps)


def tensors(batch, seqlen_q, seqlen_k, dtype=torch.float32, heads=(HEADS,)):
    sizes = seqlen_q, seqlen_k, seqlen_k
    made = [torch.randn(batch, n, *heads, DIM, dtype=dtype) for n in sizes]
    return [x.requires_grad_() for x in made]


def test_every_class_is_tested():
    classes = {
        name
        for name, value in inspect.getmembers(attn_bias, inspect.isclass)
        if issubclass(value, attn_bias.AttentionBias) and name.endswith("Mask")
    }
    assert classes == set(MASKS)


@pytest.mark.parametrize("name", MASKS)
def test_dense_form_of_masks(name):
    mask, _, _, total = MASKS[name]
    want = expected_mask(*MASKS[name])
    shape = 2, 1, sum(lengths_of(mask)), total
    got = mask.to("cpu").materialize(shape, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), want.expand(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_gradients(name, dtype):
    mask, _, keys, total = MASKS[name]
    qkv = tensors(2 if keys is None else 1, sum(lengths_of(mask)), total, dtype)
    out = xops.memory_efficient_attention(*qkv, attn_bias=mask, scale=0.3)
    want = expected(*qkv, expected_mask(*MASKS[name]), 0.3)
    assert out.dtype == dtype
    assert_close(out, want, dtype)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, grad_out)
    wants = torch.autograd.grad(want, qkv, grad_out.double())
    for got, grad in zip(grads, wants, strict=True):
        scale = grad.abs().max().clamp(min=1.0)
        assert_close(got / scale, grad / scale, dtype)


@pytest.mark.parametrize("name", MASKS)
def test_no_dense_mask_is_made(name, monkeypatch):
    """Attention with a structured mask creates neither a dense mask nor a bias."""
    mask, _, _, total = MASKS[name]
    monkeypatch.setattr(attn_bias, "_dense", lambda *args: pytest.fail("a dense mask"))
    qkv = tensors(1, sum(lengths_of(mask)), total)
    assert mask.mask is None or not (mask.mask.dense_masks or mask.mask.biases)
    xops.memory_efficient_attention_forward(*qkv, mask)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("name", [None, "LowerTriangularMask", "BlockDiagonalPaddedKeysMask"])
def test_groups(name, repeated):
    mask, _, _, total = MASKS[name] if name else (None, None, None, 15)
    bias = expected_mask(*MASKS[name]) if name else None
    q = torch.randn(1, 9, 2, 3, DIM, requires_grad=True)
    key, value = (torch.randn(1, total, 2, 1, DIM, requires_grad=True) for _ in range(2))
    given = [x.expand(-1, -1, -1, 3, -1) if repeated else x for x in (key, value)]
    out = xops.memory_efficient_attention(q, *given, attn_bias=mask)
    heads = (x.expand(-1, -1, -1, 3, -1).flatten(2, 3) for x in (q, key, value))
    want = expected(*heads, bias).unflatten(2, (2, 3))
    assert_close(out, want)
    grads = (torch.autograd.grad(x.square().sum(), (q, key, value)) for x in (out, want))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=2e-5)
    with torch.no_grad():  # without gradients, repeated heads are removed before the call
        assert_close(xops.memory_efficient_attention(q, *given, mask), want)
    lse = fmha.memory_efficient_attention_forward_requires_grad(q, *given, mask)[1]
    assert lse.shape == (1, 2, 3, 9)


def test_gradient_of_expanded_leaves():
    """The gradient of an expanded key has the expanded shape and is not summed over heads."""
    q = torch.randn(2, 5, HEADS, DIM)
    key, value = (torch.randn(2, 7, 1, DIM).expand(-1, -1, HEADS, -1) for _ in range(2))
    key.requires_grad_()
    out = xops.memory_efficient_attention(q, key, value)
    want = expected(q, key, value)
    grads = (torch.autograd.grad(x.square().sum(), key)[0] for x in (out, want))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["BMK", "BMHK", "BMGHK"])
def test_tensor_bias(layout, causal):
    heads = {"BMK": (), "BMHK": (HEADS,), "BMGHK": (2, 3)}[layout]
    qkv = tensors(2, 5, 7, heads=heads)
    bias = torch.randn(2, *heads, 5, 7, requires_grad=True)
    mask = attn_bias.LowerTriangularMask().add_bias(bias) if causal else bias
    out = xops.memory_efficient_attention(*qkv, attn_bias=mask)
    dense = bias + torch.full((5, 7), float("-inf")).triu(1) if causal else bias
    if causal:
        assert torch.equal(mask.materialize(bias.shape), dense)
    count = max(1, sum(heads) if len(heads) < 2 else 6)
    want = expected(*(x.reshape(2, -1, count, DIM) for x in qkv), dense.reshape(2, count, 5, 7))
    assert_close(out, want.reshape(out.shape))
    grads = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, want))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    broadcast = bias[:1, ..., :1, :].detach()  # smaller than (batch, heads, queries, keys)
    out = xops.memory_efficient_attention(*qkv, attn_bias=broadcast)
    expanded = broadcast.expand_as(bias).contiguous()
    assert torch.equal(out, xops.memory_efficient_attention(*qkv, attn_bias=expanded))


def test_lists_of_tensors():
    lists = [torch.randn(2, 3, HEADS, DIM), torch.randn(1, 6, HEADS, DIM)]
    longer = [torch.randn(2, 4, HEADS, DIM), torch.randn(1, 7, HEADS, DIM)]
    mask, x = attn_bias.BlockDiagonalMask.from_tensor_list(lists)
    out = mask.split(xops.memory_efficient_attention(x, x, x, mask.make_causal()))
    for got, part in zip(out, lists, strict=True):
        causal = torch.full((part.shape[1],) * 2, float("-inf")).triu(1)
        assert_close(got, expected(part, part, part, causal))
    mask, q, k, v = attn_bias.BlockDiagonalMask.from_tensor_lists_qkv(lists, longer, longer)
    out = mask.split_queries(xops.memory_efficient_attention(q, k, v, mask))
    for got, part, keys in zip(out, lists, longer, strict=True):
        assert_close(got, expected(part, keys, keys))
    assert all(map(torch.equal, mask.split_kv(k), longer))
    assert attn_bias.BlockDiagonalMask.from_tensor_lists_qkv(lists, longer)[3] is None
    with pytest.raises(ValueError, match="split_queries or split_kv"):
        mask.split(q)
    with pytest.raises(ValueError, match=r"must have shape \(1, 12, \.\.\.\), got \(1, 15"):
        mask.split_queries(k)


def test_lengths_are_read_again_after_changes_in_place():
    """A change of a mask's lengths in place takes effect in the next call."""
    for name in WITH_PADDED_KEYS:
        old, rule, _, _ = MASKS[name]
        info = replace(old.k_seqinfo, seqlen=old.k_seqinfo.seqlen.clone())
        mask = replace(old, k_seqinfo=info)
        q, k, v = tensors(1, 9, 21)
        before = xops.memory_efficient_attention(q, k, v, mask)
        info.seqlen.sub_(1)
        after = xops.memory_efficient_attention(q, k, v, mask)
        keys = [rows[:-1] for rows in PADDED]
        assert_close(after, expected(q, k, v, expected_mask(mask, rule, keys, 21)))
        assert not torch.equal(before, after)


def test_unused_keys_may_be_nan():
    for name in WITH_PADDED_KEYS:
        q, k, v = tensors(1, 9, 21)
        unused = torch.ones(21, dtype=torch.bool)
        unused[[row for rows in PADDED for row in rows]] = False
        want = expected(q, k, v, expected_mask(*MASKS[name]))
        k, v = (x.masked_fill(unused[:, None, None], float("nan")) for x in (k, v))
        assert_close(xops.memory_efficient_attention(q, k, v, MASKS[name][0]), want)


def test_lse_and_dropout():
    q, k, v = tensors(2, 5, 7)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
    assert not out.requires_grad and lse.shape == (2, HEADS, 5)
    scores = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) * DIM**-0.5
    assert_close(lse, scores.logsumexp(-1))
    for name in ("BlockDiagonalMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask"):
        mask, _, _, total = MASKS[name]
        q, k, v = tensors(1, 9, total)
        _, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, mask)
        scores = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) * DIM**-0.5
        assert_close(lse, (scores + expected_mask(*MASKS[name])).logsumexp(-1))
    ones = torch.ones(1, 400, 1, DIM)
    out = xops.memory_efficient_attention(ones, ones, ones, p=0.5)
    assert 0.0 < out.std() < 0.2 and abs(out.mean() - 1.0) < 0.05


def test_empty_tensors():
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (0, 0)):
        q, k, v = tensors(2, seqlen_q, seqlen_k)
        out = xops.memory_efficient_attention(q, k, v)
        assert out.shape == q.shape and not out.any()
    for lengths in ([0, 0], [0, 3]):
        q, k, v = tensors(1, sum(lengths), 10)
        for kind in (attn_bias.BlockDiagonalPaddedKeysMask, attn_bias.BlockDiagonalMask):
            between = (5,) if "Padded" in kind.__name__ else ()
            mask = kind.from_seqlens(lengths, *between, [5, 5])
            want = expected(q, k, v, mask.materialize((len(q[0]), 10)))
            assert_close(xops.memory_efficient_attention(q, k, v, mask), want)


@pytest.mark.parametrize(
    "name", ["LowerTriangularMask", "BlockDiagonalCausalMask", WITH_PADDED_KEYS[1]]
)
def test_compiled(name):
    """A function compiles to one graph if masks are its arguments or are created in it."""
    mask, _, _, total = MASKS[name]
    q, k, v = tensors(1, 9, total)

    def attend(q, k, v, mask=None):
        mask = attn_bias.LowerTriangularMask() if mask is None else mask
        return xops.memory_efficient_attention(q, k, v, mask)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_close(compiled(q, k, v, mask), attend(q, k, v, mask))
    if name == "LowerTriangularMask":
        assert_close(compiled(q, k, v), attend(q, k, v))


def test_the_spec_of_a_mask_is_cached(monkeypatch):
    """The layers of a model, which share a mask, compute its MaskSpec once."""
    q, k, v = tensors(1, 9, 15)
    xops.memory_efficient_attention(q, k, v, blocks)
    monkeypatch.setattr(packed, "spec_of_mask", lambda *args: pytest.fail("not cached"))
    xops.memory_efficient_attention(q, k, v, blocks)


def test_no_argument_is_ignored():
    q, k, v = tensors(2, 5, 5)
    attend = xops.memory_efficient_attention
    with pytest.raises(NotImplementedError, match="op must be None"):
        attend(q, k, v, op=("fw", "bw"))
    with pytest.raises(NotImplementedError, match=r"output_dtype must be torch\.float32"):
        attend(q, k, v, output_dtype=torch.float64)
    assert torch.equal(attend(q, k, v, output_dtype=torch.float32), attend(q, k, v))
    with pytest.raises(TypeError, match="bias"):
        attend(q, k, v, bias=None)
    with pytest.raises(ValueError, match=r"attn_bias must be a float tensor with 4 .* torch\.bool"):
        attend(q, k, v, torch.ones(2, HEADS, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_bias must be a float tensor .* \(5, 5\)"):
        attend(q, k, v, torch.zeros(5, 5))

    class UserMask(attn_bias.LowerTriangularMask):
        """User-defined subclass; refused, because an overridden materialize would be ignored."""

    with pytest.raises(NotImplementedError, match=r"attn_bias must be .*, got .*\.UserMask"):
        attend(q, k, v, UserMask())
    with pytest.raises(NotImplementedError, match=r"attn_bias must be .*, got builtins\.object"):
        attend(q, k, v, object())
    with pytest.raises(NotImplementedError, match=r"attn_bias must be .*, got .*\.Blocks"):
        attend(q[:1], k[:1], v[:1], attn_bias.Blocks(blocks.q_seqinfo, blocks.k_seqinfo))
    with pytest.raises(NotImplementedError, match=r"attn_bias must be .*, got .*\.AttentionBias"):
        attend(q, k, v, attn_bias.AttentionBias())
    with pytest.raises(ValueError, match="must have batch size 1, got"):
        attend(q, k, v, blocks)
    with pytest.raises(
        ValueError, match=r"must have \(9, 15\) rows in total \(like attn_bias\), got \(5, 5\)"
    ):
        attend(q[:1], k[:1], v[:1], blocks)
    with pytest.raises(ValueError, match="3, 4 or 5 dimensions"):
        attend(q, k[0], v)
    with pytest.raises(ValueError, match="same number of groups"):
        attend(q[:, :, None], k.unflatten(2, (2, 2)), v[:, :, None])


def test_checks_of_masks():
    with pytest.raises(ValueError, match="window_size must be > 0, got 0"):
        blocks.make_local_attention(0)
    with pytest.raises(ValueError, match="window_size must be > 0, got 0"):
        attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(0)
    with pytest.raises(ValueError, match="window_right must be >= 0, got -1"):
        attn_bias.LocalAttentionFromBottomRightMask(0, -1)
    with pytest.raises(ValueError, match="at least its q_seqlen, got kv_seqlen 3 and q_seqlen 4"):
        attn_bias.BlockDiagonalMask.from_seqlens([4], [3]).make_causal_from_bottomright()
    with pytest.raises(ValueError, match="must have 2 elements"):
        attn_bias.BlockDiagonalMask.from_seqlens([4, 1], [3])
    with pytest.raises(ValueError, match=r"at most kv_padding 3, got \[4\]"):
        attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([4], 3, [4])
    with pytest.raises(ValueError, match="must have 2 values"):
        attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([4], [0], [4])
    with pytest.raises(ValueError, match="must end at or before position 9"):
        attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1] * 3, [1, 1, 10], TABLES, 3)


def test_rows_that_do_not_exist_are_refused():
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 12, 2, 8)
    paged = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens
    gappy = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens
    for mask, match in (
        (paged([2, 2], [6, 5], torch.tensor([[0, 1], [2, -1]]), 3), r"pages in \[0, 4\), got -1"),
        (gappy([2, 2], [-2, 6, 12], [3, 4]), r"attn_bias must select rows in \[0, 12\)"),
        (gappy([2, 2], [0, 6, 12], [3, -4]), "attn_bias must select rows"),
    ):
        with pytest.raises(ValueError, match=match):
            xops.memory_efficient_attention(q, k, k, mask)
    with pytest.raises(ValueError, match="value must have the 12 rows of key, got 10"):
        xops.memory_efficient_attention(q, k, k[:, :10], gappy([2, 2], [0, 6, 12], [3, 4]))


def test_signatures():
    names = [*inspect.signature(xops.memory_efficient_attention).parameters]
    assert names == ["query", "key", "value", "attn_bias", "p", "scale", "op", "output_dtype"]
    assert fmha.BlockDiagonalMask is attn_bias.BlockDiagonalMask
    assert xops.LowerTriangularMask is attn_bias.LowerTriangularMask
