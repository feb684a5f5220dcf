"""fused_attn.compat.flash_attn, compared with plain formulas in float64."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

import fused_attn.compat.flash_attn as flash_attn
from fused_attn.compat.flash_attn.arguments import mask_of

WINDOWS = [(-1, -1), (3, 2), (None, 1)]
LENGTHS = [(7, 7), (3, 9), (9, 4)]  # queries, keys
# Each (causal, window, lengths) is paired with one ALiBi and softcap setting, in rotation.
CASES = [
    (causal, window, alibi, softcap, lengths)
    for (causal, window, lengths), (alibi, softcap) in zip(
        itertools.product([False, True], WINDOWS, LENGTHS),
        itertools.cycle(itertools.product([False, True], [0.0, 5.0])),
        strict=False,
    )
]
HEADS, HEADS_KV, DIM = 4, 2, 8


def expected(q, k, v, causal=False, window_size=(-1, -1), alibi_slopes=None, softcap=0.0):
    """Return float64 attention, (batch, seqlen, heads, dim), from the full score matrix."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    distance = distance - torch.arange(k.shape[2])  # > 0 for keys before the query's position
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance.abs()
    left, right = window_size
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        visible &= distance <= left
    if causal or (right is not None and right >= 0):
        visible &= distance >= -(0 if causal else right)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def assert_close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=2e-6)


def qkv(seqlen_q, seqlen_k):
    sizes = (seqlen_q, HEADS), (seqlen_k, HEADS_KV), (seqlen_k, HEADS_KV)
    return [torch.randn(2, *size, DIM) for size in sizes]


@pytest.fixture(params=CASES, ids=str)
def case(request):
    """Return [query, key, value], and flash-attn's arguments for mask, ALiBi and softcap."""
    causal, window_size, alibi, softcap, lengths = request.param
    slopes = torch.rand(HEADS) if alibi else None
    names = "causal", "window_size", "alibi_slopes", "softcap"
    return qkv(*lengths), dict(zip(names, (causal, window_size, slopes, softcap), strict=True))


def ends(lengths):
    return torch.nn.functional.pad(torch.as_tensor(lengths).cumsum(0), (1, 0)).int()


def pages_of(rows, used, table):
    """Return pages of two rows that contain the `used` rows of each sequence, and NaN elsewhere."""
    pages = torch.full((3 * table.shape[1], 2, *rows.shape[2:]), float("nan"))
    for b, length in enumerate(used):
        for i in range(length):
            pages[table[b, i // 2], i % 2] = rows[b, i]
    return pages


def test_batches_and_packed_sequences(case):
    tensors, mask = case
    want = expected(*tensors, **mask)
    assert_close(flash_attn.flash_attn_func(*tensors, **mask), want)
    seqlen_q, seqlen_k = tensors[0].shape[1], tensors[1].shape[1]
    lengths = ends([seqlen_q] * 2), ends([seqlen_k] * 2), seqlen_q, seqlen_k
    rows = (x.flatten(0, 1) for x in tensors)
    assert_close(flash_attn.flash_attn_varlen_func(*rows, *lengths, **mask), want.flatten(0, 1))


def test_pages_and_used_rows(case):
    (q, k, v), mask = case
    used = torch.tensor([k.shape[1] - 1, k.shape[1]])
    used_q = torch.tensor([q.shape[1], q.shape[1] - 1])
    count = (k.shape[1] + 1) // 2
    table = torch.randperm(3 * count, dtype=torch.int32)[: 2 * count].view(2, count)
    pages = (pages_of(x, used, table) for x in (k, v))
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), *pages, ends([q.shape[1]] * 2), None, q.shape[1], k.shape[1], **mask,
        block_table=table, seqused_q=used_q, seqused_k=used, return_attn_probs=True,
    )  # fmt: skip
    for b, part in enumerate(out.unflatten(0, (2, -1))):
        keys, values = (x[b : b + 1, : used[b]] for x in (k, v))
        want = expected(q[b : b + 1, : used_q[b]], keys, values, **mask)
        assert_close(part[: used_q[b]], want[0])
    assert out[-1].eq(0).all() and lse[:, -1].eq(float("-inf")).all()


@pytest.mark.parametrize("paged", [False, True])
def test_cache(case, paged):
    """Appended keys, left padding, and reordered or paged cache rows match the formula."""
    (q, _, _), mask = case
    q = q[:, :4]
    new_k, new_v = torch.randn(2, 2, q.shape[1], HEADS_KV, DIM)
    k_cache, v_cache = torch.randn(2, 5, 16, HEADS_KV, DIM)
    before = k_cache.clone(), v_cache.clone()
    lengths, left, rows = torch.tensor([5, 7]), torch.tensor([0, 2]), torch.tensor([3, 1])
    where = {"block_table": rows[:, None].int()} if paged else {"cache_batch_idx": rows}
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v,
        cache_seqlens=lengths, cache_leftpad=left, **where, **mask,
    )  # fmt: skip
    for b, (row, start, stop) in enumerate(zip(rows, left, lengths, strict=True)):
        keys, values = (
            torch.cat([cache[row, start:stop], new[b]])[None]
            for cache, new in zip(before, (new_k, new_v), strict=True)
        )
        assert_close(out[b], expected(q[b : b + 1], keys, values, **mask)[0])
        assert torch.equal(k_cache[row, stop : stop + q.shape[1]], new_k[b])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_in_the_cache(causal, interleaved):
    """Pairs of features of queries and appended keys are multiplied by exp(i * angle)."""
    angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    cache, new = torch.randn(2, 2, 16, 2, DIM), torch.randn(2, 2, 3, 2, DIM)
    q = torch.randn(2, 3, 4, DIM)
    before, lengths = cache.clone(), torch.tensor([4, 9])

    def rotated(x, positions):
        part = x[..., :6].double()
        pairs = part.unflatten(-1, (3, 2) if interleaved else (2, 3))
        pairs = pairs if interleaved else pairs.mT
        turn = torch.polar(torch.ones(()).double(), angles.double())[positions][:, None]
        part = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        part = part if interleaved else part.mT
        return torch.cat([part.flatten(-2), x[..., 6:].double()], -1)

    out = flash_attn.flash_attn_with_kvcache(
        q, *cache, *new, angles.cos(), angles.sin(), cache_seqlens=lengths, causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b, length in enumerate(lengths.tolist()):
        positions = torch.arange(length, length + 3)
        keys = torch.cat([before[0, b, :length].double(), rotated(new[0, b], positions)])
        values = torch.cat([before[1, b, :length], new[1, b]])
        query = rotated(q[b], positions if causal else positions[:1].expand(3))
        assert_close(out[b], expected(query[None], keys[None], values[None], causal)[0])


def test_packed_tensors_and_gradients():
    qkv = torch.randn(2, 9, 3, HEADS, DIM, requires_grad=True)
    cu_seqlens = ends([9, 9])
    results = [
        expected(*qkv.unbind(2), causal=True),
        flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, None, True),
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(
            qkv.flatten(0, 1), cu_seqlens, 9, causal=True
        ).unflatten(0, (2, 9)),
        flash_attn.flash_attn_varlen_kvpacked_func(
            qkv[:, :, 0].flatten(0, 1), qkv[:, :, 1:].flatten(0, 1), cu_seqlens, cu_seqlens, 9, 9,
            causal=True,
        ).unflatten(0, (2, 9)),
    ]  # fmt: skip
    want, *grads = [torch.autograd.grad(out.square().sum(), qkv)[0] for out in results]
    for out, grad in zip(results[1:], grads, strict=True):
        assert_close(out, results[0])
        torch.testing.assert_close(grad, want, rtol=0.0, atol=2e-5)


def test_padding_and_back():
    x, mask = torch.randn(3, 5, 4), torch.tensor([[1, 1, 0, 0, 0], [1] * 5, [0, 1, 1, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0] * 5, [0] * 5])
    rows, indices, cu_seqlens, longest, used = flash_attn.bert_padding.unpad_input(x, mask, unused)
    kept = (mask + unused).bool()
    assert torch.equal(rows, x[kept]) and longest == 5
    assert cu_seqlens.tolist() == [0, 3, 8, 10] and used.tolist() == [2, 5, 2]
    padded = flash_attn.bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * kept[..., None])
    flat = flash_attn.bert_padding.index_first_axis(x.flatten(0, 1), indices)
    assert torch.equal(flat, rows)


def test_no_argument_is_ignored():
    q, k, v = qkv(3, 3)
    plain = flash_attn.flash_attn_func(q, k, v)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, num_splits=3, qv=None), plain)
    with pytest.raises(NotImplementedError, match="does not support attention_chunk"):
        flash_attn.flash_attn_func(q, k, v, attention_chunk=2)
    with pytest.raises(NotImplementedError, match="does not support q_descale"):
        flash_attn.flash_attn_func(q, k, v, q_descale=torch.ones(()))
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        flash_attn.flash_attn_func(q, k, v, window=(1, 1))
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    with pytest.raises(TypeError, match="except with both block_table and seqused_k"):
        flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], ends([3]), None, 3, 3, seqused_k=torch.tensor([3])
        )
    with pytest.raises(ValueError, match="given together"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v, torch.ones(3, 4), cache_seqlens=0)
    sinks = torch.zeros(HEADS)
    out = flash_attn.flash_attn_func(q, k, v, learnable_sink=sinks)
    _, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert_close(out, (plain * torch.sigmoid(lse).mT[..., None]).double())


def test_shapes_that_flash_attn_refuses():
    q, k, v = qkv(3, 3)
    for wrong in ([q[0], k[0], v[0]], [q, k[:1], v[:1]]):
        with pytest.raises(ValueError, match=r"must have shape \(batch, seqlen, num_heads"):
            flash_attn.flash_attn_func(*wrong)
    with pytest.raises(ValueError, match="num_heads of q must be a multiple of 3, got 4"):
        flash_attn.flash_attn_func(q, *torch.randn(2, 2, 3, 3, DIM))
    with pytest.raises(TypeError, match=r"window_size must be \(left, right\)"):
        flash_attn.flash_attn_func(q, k, v, window_size=2)
    options = {"cache_seqlens": torch.tensor([1, 2])}
    for name in ("cache_leftpad", "cache_batch_idx"):
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            flash_attn.flash_attn_with_kvcache(q, k, v, **options, **{name: torch.tensor([0])})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"block_table": [[0, -1], [1, 2]]}, ValueError, r"pages in \[0, 4\), got -1"),
        ({"block_table": [[0, 4], [1, 2]]}, ValueError, r"pages in \[0, 4\), got 0 to 4"),
        ({"block_table": [[0, 3]]}, ValueError, r"must have shape \(2, max_pages\)"),
        ({"block_table": [[0.0, 3.0], [1.0, 2.0]]}, TypeError, "block_table must be an int32"),
        ({"seqused_k": [9, 3]}, ValueError, r"must select rows in \[0, 8\), got \[0, 9\)"),
        ({"seqused_k": [-1, 3]}, ValueError, "must select rows"),
        ({"seqused_q": [2, 2]}, ValueError, r"seqused_q must select rows in \[0, 1\)"),
        ({"block_table": None, "seqused_k": [5, 4]}, ValueError, r"seqused_k .* \[0, 4\)"),
        (
            {"block_table": None, "cu_seqlens_k": [0, 14, 99], "seqused_k": [3, 3]},
            ValueError,
            r"seqused_k must select rows in \[0, 16\), got \[14, 17\)",
        ),
        ({"block_table": None, "v": torch.zeros(15, 1, 8)}, ValueError, "v must have the shape"),
    ],
)
def test_rows_that_do_not_exist_are_refused(changed, error, message):
    pages = torch.randn(4, 4, 1, 8)
    call = {
        "q": torch.randn(3, 1, 8), "k": pages, "v": pages, "cu_seqlens_q": [0, 1, 3],
        "cu_seqlens_k": [0, 4, 16], "max_seqlen_q": 2, "max_seqlen_k": 16,
        "block_table": [[0, 3], [1, 2]], "seqused_k": [6, 3],
    }  # fmt: skip
    call |= changed
    if call["block_table"] is None:
        call |= {n: call[n].flatten(0, 1) for n in "kv" if call[n].dim() == 4}
    call = {n: torch.tensor(v) if isinstance(v, list) else v for n, v in call.items()}
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_varlen_func(**call)


def test_signatures():
    """Positional arguments are in the same order as in flash-attn 2.8."""
    order = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    names = [*inspect.signature(flash_attn.flash_attn_func).parameters]
    assert names[3:11] == [*order.split(), "return_attn_probs"]
    names = [*inspect.signature(flash_attn.flash_attn_varlen_func).parameters]
    assert names[7:16] == [*order.split(), "return_attn_probs", "block_table"]
    assert mask_of(False, (-1, None)) is None
