"""Backend "flash": the arguments passed to the engines, call options, and torch.compile."""

import flash_models
import pytest
import torch
from helpers import deterministic

from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends.flash.engines import aligned


def tensors(*sizes, **options):
    """Return a (2, 2, size, 16) tensor for each size."""
    return [torch.randn(2, 2, n, 16, dtype=torch.float64, **options) for n in sizes]


def calls_of(*arguments, **options):
    """Return the arguments of the engine's calls, after a check of their results."""
    got, wanted = (
        F.scaled_dot_product_attention(*arguments, **options, backend=name)
        for name in ("flash", "eager")
    )
    torch.testing.assert_close(got, wanted)
    return flash_models.calls


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3", "flash-attn-4"])
@pytest.mark.parametrize(
    ("mask", "sizes", "expected"),
    [
        (None, (5, 9), (False, None, None, 9)),
        (masks.causal(), (5, 5), (True, None, None, 5)),
        (masks.causal("bottom_right"), (5, 9), (True, None, None, 9)),
        (masks.causal(), (5, 9), (True, None, None, 5)),  # keys after the last query are cropped
        (masks.causal(), (9, 5), (False, None, 4, 5)),
        (masks.sliding_window(9, 3, "bottom_right"), (3, 20), (False, 9, None, 12)),
        (masks.sliding_window(3, 0), (9, 9), (False, 3, 0, 9)),
        (masks.sliding_window(3, 0, "bottom_right"), (2, 9), (False, 3, 0, 5)),
        (masks.sliding_window(2, 1), (4, 9), (False, 3, 0, 5)),
        (masks.sliding_window(2, -1), (9, 9), (False, 2, None, 9)),
        (masks.sliding_window(50, 50), (9, 9), (False, None, None, 9)),
    ],
    ids=str,
)
def test_windows(install, name, mask, sizes, expected):
    """Windows are passed relative to the last query and key; None or -1 means no limit."""
    install(name)
    query, key = tensors(*sizes)
    given = calls_of(query, key, key, mask)[-1]
    causal, *sides, keys = expected
    unlimited = None if name == "flash-attn-4" else -1
    assert given["causal"] is causal and given["k"].shape[1] == keys
    assert given["window_size"] == tuple(unlimited if side is None else side for side in sides)


def test_no_key_is_visible(install):
    install("flash-attn")
    query, key = tensors(3, 20)
    mask = masks.sliding_window(-1, 0) & masks.sliding_window(0, -1, "bottom_right")
    assert not calls_of(query, key, key, mask, return_lse=True)


def test_rows_stay_in_place(install):
    """Padded batches are not copied: cu_seqlens marks the padding as separate sequences."""
    install("flash-attn-3")
    query = torch.randn(2, 10, 2, 16, dtype=torch.float64).transpose(1, 2)
    lengths = torch.tensor([4, 7])
    mask = masks.padding(lengths, lengths) & masks.causal()
    for _ in range(2):
        first, *others = calls_of(query, query, query, mask)
    assert len(others) == 1 and first["cu_seqlens_q"] is others[0]["cu_seqlens_q"]  # cached
    assert first["cu_seqlens_q"].tolist() == [0, 4, 10, 10, 17, 20, 20]
    assert first["cu_seqlens_k"].tolist() == [0, 4, 4, 10, 17, 17, 20]
    assert first["q"].data_ptr() == query.data_ptr()
    assert first["seqused_q"] is None and first["seqused_k"] is None and first["causal"]


def test_top_left_causal_over_padding_keys(install):
    """A second call, without a mask, computes the queries after the last real key."""
    install("flash-attn")
    (query,) = tensors(10)
    first, second = calls_of(query, query, query, masks.causal() & masks.padding([4, 10]))
    assert first["causal"] and not second["causal"]
    counts = [[c[f"cu_seqlens_{side}"].diff().tolist() for side in "qk"] for c in (first, second)]
    assert counts[0] == [[4, 6, 0, 0, 10, 0, 0, 0], [4, 0, 0, 6, 10, 0, 0, 0]]
    assert counts[1] == [[4, 6, 0, 0, 10, 0, 0, 0], [0, 4, 0, 6, 0, 10, 0, 0]]


@pytest.mark.parametrize("sides", [(9, 5), (9, -1), (-1, 4)], ids=str)
@pytest.mark.parametrize("seqlen_k", [12, 15])
def test_top_left_window_over_left_padding(install, sides, seqlen_k):
    """Top-left windows are supported with left padding: all sequences end at the same position."""
    install("flash-attn-4")
    query, key = tensors(12, seqlen_k)
    mask = masks.sliding_window(*sides) & masks.padding([5, 11], side="left")
    left, right = calls_of(query, key, key, mask)[-1]["window_size"]
    offset = seqlen_k - 12
    assert left == (None if sides[0] < 0 else sides[0] + offset)
    assert right == (None if sides[1] < 0 else sides[1] - offset)


def test_one_query(install):
    """Calls with one query pass max_seqlen_q=2, because 1 has a special meaning in flash-attn."""
    install("flash-attn")
    query, key = tensors(1, 9)
    query = torch.cat([query, query], 1)
    call = calls_of(query, key, key, masks.padding([4, 9]), enable_gqa=True)[-1]
    assert call["max_seqlen_q"] == 2


def test_misaligned_rows_are_copied(install):
    """Rows that are not aligned to 16 bytes are copied: the kernels load 16 bytes at a time."""
    install("flash-attn")
    rows = torch.randn(1, 9, 2, 3 * 16 + 1, dtype=torch.float64).transpose(1, 2)
    query, key = rows[..., :16], rows[..., 1:17]
    call = calls_of(query, key, query)[-1]
    assert all(call[name].is_contiguous() for name in "qkv")


def test_deterministic(install):
    install("flash-attn")
    (query,) = tensors(8)
    with deterministic():
        calls_of(query, query, query)
    assert [call["deterministic"] for call in calls_of(query, query, query)] == [True, False]


def test_early_flash_attn_3(install, monkeypatch):
    """Early builds of flash-attn 3, which always return (out, lse), are supported."""
    install("flash-attn-3")

    def early(q, k, v, softmax_scale, causal, window_size, softcap, deterministic):
        return flash_models.fa3_func(
            q, k, v, softmax_scale, causal, window_size=window_size, return_attn_probs=True
        )

    monkeypatch.setattr(flash_models.MODULES["flash-attn-3"], "flash_attn_func", early)
    (query,) = tensors(8)
    for return_lse in (False, True):
        assert calls_of(query, query, query, return_lse=return_lse)


def test_second_derivatives_are_an_error(install):
    install("flash-attn")
    (query,) = tensors(8, requires_grad=True)
    out = F.scaled_dot_product_attention(query, query, query, backend="flash")
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="does not support second derivatives"):
        grad.square().sum().backward()


def test_sinks(install):
    """With attention sinks, the engine runs once, and the backend rescales its output."""
    install("flash-attn")
    query, key = tensors(3, 9)
    assert len(calls_of(query, key, key, sinks=torch.ones(2))) == 1


def test_torch_compile(install):
    """Under torch.compile, an engine that cannot be traced raises an error."""
    install("flash-attn-4")
    (query,) = tensors(8)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"flash-attn-4 cannot be traced by torch\.compile"):
        compiled(query, query, query, is_causal=True, backend="flash")
    assert not flash_models.calls


def traceable_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **options):
    """Compute attention over packed rows with operations that torch.compile can trace."""
    rows = [torch.arange(len(t)) for t in (q, k)]
    ends = [c[1:].contiguous() for c in (cu_seqlens_q, cu_seqlens_k)]
    ids = [torch.searchsorted(e, row, right=True) for e, row in zip(ends, rows, strict=True)]
    end_q, end_k = (e[ids[0]] for e in ends)
    distance = (rows[1] - end_k[:, None]) - (rows[0] - end_q)[:, None]
    visible = (ids[0][:, None] == ids[1]) & (distance <= 0 if causal else True)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    weights = scores.masked_fill(~visible, -1e30).softmax(-1) * visible
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_one_graph(install, monkeypatch, dynamic):
    """Padding masks compile with fullgraph=True; out and gradient match eager attention."""
    install("flash-attn")
    module = flash_models.MODULES["flash-attn"]
    monkeypatch.setattr(module, "flash_attn_varlen_func", traceable_varlen)
    (query,) = tensors(8, requires_grad=True)

    def attend(query, lengths, backend):
        mask = masks.causal() & masks.padding(lengths, lengths)
        return F.scaled_dot_product_attention(query, query, query, mask, backend=backend)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    lengths = torch.tensor([3, 8])
    got, wanted = compiled(query, lengths, "flash"), attend(query, lengths, "eager")
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(out.square().sum(), query)[0] for out in (got, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("name", flash_models.ENGINES)
def test_scales_that_are_not_positive(install, name, scale):
    """Engines receive positive scales, because they multiply masked scores of -inf by the scale."""
    install(name)
    (x,) = tensors(20, requires_grad=True)
    outs = [
        F.scaled_dot_product_attention(
            x, x, x, masks.padding([20, 7]), is_causal=True, scale=scale, backend=backend
        )
        for backend in ("flash", "eager")
    ]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x)[0] for out in outs))


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_dense_tensors_are_aligned(offset):
    x = torch.zeros(offset + 2 * 4 * 3 * 16, dtype=torch.float16)[offset:].view(2, 4, 3, 16)
    got = aligned(x)
    assert got.storage_offset() % 8 == 0 and (got is x) == (offset != 1) and torch.equal(got, x)
