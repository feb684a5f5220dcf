"""Attention sinks match a softmax with one additional column of scores."""

from functools import partial

import pytest
import torch
from helpers import BACKENDS, DTYPES, assert_like_eager, drawn, random_qkv, short

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask

SINKS = torch.randn(4, generator=drawn(7))


def visible_under(mask, seqlen_q, seqlen_k):
    sizes, cpu = (2, 4, seqlen_q, seqlen_k), torch.device("cpu")
    return materialize(spec_of_mask(mask, *sizes, cpu), *sizes, cpu, torch.float32)[0]


def softmax_with_a_column(query, key, value, sinks, visible):
    """Return out and lse of attention with one more key, whose score is the sink and value is 0."""
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], -1)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total)[..., :-1] @ value, (largest + total.log()).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks(backend, dtype):
    mask = masks.causal("bottom_right") & masks.padding([30, 41])
    visible = visible_under(mask, 45, 41)
    assert not visible.any(-1).all()  # in some rows, only the sink is visible

    def function(backend):
        if backend == "eager":
            return lambda **tensors: softmax_with_a_column(**tensors, visible=visible)

        def fused(query, key, value, sinks):
            return F.scaled_dot_product_attention(
                query, key, value, mask.to(query.device), enable_gqa=True, sinks=sinks,
                return_lse=True, backend=backend,
            )  # fmt: skip

        return fused

    tensors = random_qkv(2, 4, 2, 45, 41, 32) | {"sinks": SINKS}
    assert_like_eager(function, tensors, dtype, backend)


def test_without_a_gradient():
    """Without gradients, sinks match the reference, and sinks of -inf have no effect."""
    tensors, mask = list(random_qkv(2, 4, 2, 5, 7, 16).values()), masks.padding([7, 0])
    call = partial(F.scaled_dot_product_attention, *tensors, mask, enable_gqa=True)
    want = softmax_with_a_column(*tensors, SINKS, visible_under(mask, 5, 7))
    torch.testing.assert_close(call(sinks=SINKS, return_lse=True), want)
    none = torch.full((4,), float("-inf"))
    assert all(map(torch.equal, call(sinks=none, return_lse=True), call(return_lse=True)))


def test_packed_and_decoding():
    lengths = torch.tensor([9, 4])
    query, key, value = random_qkv(2, 4, 2, 9, 9, 16).values()
    want = F.scaled_dot_product_attention(
        query, key, value, masks.causal() & masks.padding(lengths), enable_gqa=True, sinks=SINKS
    )
    ends = torch.tensor([0, 9, 13])
    rows = [
        torch.cat([t[0].transpose(0, 1), t[1, :, :4].transpose(0, 1)]) for t in (query, key, value)
    ]
    out, lse = fused_attn.varlen_attention(
        *rows, ends, ends, 9, 9, is_causal=True, sinks=SINKS, return_lse=True
    )
    assert lse.shape == (4, 13)
    torch.testing.assert_close(out[:9], want[0].transpose(0, 1))
    torch.testing.assert_close(out[9:], want[1, :, :4].transpose(0, 1))

    for cache_lengths in ([8, 8], torch.tensor([8, 3])):
        batch = torch.arange(2), slice(None), torch.as_tensor(cache_lengths)
        new_query, new_key, new_value = (t[batch][:, :, None] for t in (query, key, value))
        out = fused_attn.decode_attention(
            new_query, key.clone(), value.clone(), cache_lengths=cache_lengths,
            key=new_key, value=new_value, sinks=SINKS,
        )  # fmt: skip
        for b, n in ((0, 8), (1, 3)):
            if cache_lengths[b] == n:  # the second sequence of `want` has 4 positions
                torch.testing.assert_close(out[b, :, 0], want[b, :, n])


def test_compiled():
    """Compiled results and gradients equal those of eager calls."""
    tensors = [t.requires_grad_() for t in (*random_qkv(2, 4, 2, 9, 9, 16).values(), SINKS.clone())]

    def step(query, key, value, sinks):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, sinks=sinks
        )

    out, want = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors), step(*tensors)
    torch.testing.assert_close(out, want)
    pairs = (torch.autograd.grad(t.square().sum(), tensors) for t in (out, want))
    torch.testing.assert_close(*pairs)


def test_second_order():
    tensors = *random_qkv(1, 2, 2, 3, 4, 5).values(), SINKS[:2]
    leaves = [t.double().requires_grad_() for t in tensors]

    def function(query, key, value, sinks):
        return F.scaled_dot_product_attention(query, key, value, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sink", [0.5, 100.0, -1000.0, float("-inf")])
def test_second_derivatives_are_finite(sink, dtype):
    """Second derivatives are finite for extreme sinks, even if another row has no visible key."""
    query = torch.randn(1, 2, 4, 8, dtype=dtype, requires_grad=True)
    sinks = torch.full((2,), sink, dtype=dtype, requires_grad=True)
    mask = masks.padding([4], [3])
    _, lse = F.scaled_dot_product_attention(query, query, query, mask, sinks=sinks, return_lse=True)
    first = torch.autograd.grad(lse[:, :, :3].sin().sum(), (query, sinks), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (query, sinks))
    assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        ([0.0] * 4, TypeError, "sinks must be a float tensor, got list"),
        (torch.zeros(4, dtype=torch.int64), TypeError, "sinks must be a float tensor, got torch."),
        (torch.zeros(3), ValueError, r"sinks must have shape \(4,\) \(num_heads\), got \(3,\)"),
        (torch.zeros(4, device="meta"), ValueError, "sinks must have device cpu"),
    ],
)
def test_invalid_sinks(sinks, error, message):
    query, key, value = random_qkv(1, 4, 4, 5, 7, 16).values()
    with pytest.raises(error, match=message):
        F.scaled_dot_product_attention(query, key, value, sinks=sinks)


def test_errors():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="query must have at least 3 dimensions with sinks"):
        F.scaled_dot_product_attention(x, x, x, sinks=torch.zeros(1))
    cache = torch.zeros(1, 4, 8, 16)
    with pytest.raises(ValueError, match="sinks must not require grad"):
        fused_attn.decode_attention(
            torch.randn(1, 4, 1, 16), cache, cache.clone(), cache_lengths=[3],
            sinks=SINKS.clone().requires_grad_(),
        )  # fmt: skip


def test_a_batch_of_sinks():
    query, key, value = random_qkv(1, 4, 4, 5, 7, 16).values()
    several = torch.stack([SINKS, -SINKS])

    def call(sinks):
        return F.scaled_dot_product_attention(query, key, value, sinks=sinks)

    torch.testing.assert_close(torch.vmap(call)(several), torch.stack([call(s) for s in several]))
