"""Backend "flash" with stand-ins for its engines: random calls and the order of the engines.

The stand-ins in tests/support/flash_models.py have the signatures and semantics of the engines,
which require a GPU. These tests do not check the engines' numerics.
"""

import functools
import operator
import random

import flash_models
import pytest
import torch
from flash_models import ENGINES
from helpers import use_threads
from mask_draws import mask_of, visible_of

import fused_attn
from fused_attn import masks
from fused_attn.masks.spec import spec_of_mask


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, because several are slower for sequences of up to 40 rows."""
    with use_threads(1):
        yield


def drawn(number, with_alibi):
    """Return a random call: its tensors, its options, and a bool mask of padded keys (or None)."""
    draw = random.Random(number)
    torch.manual_seed(number)
    heads_kv = draw.choice([1, 2])
    heads = heads_kv * draw.choice([1, 2, 3])
    batch, seqlen_q, seqlen_k = draw.choice([1, 2, 3]), draw.randint(1, 40), draw.randint(1, 40)
    if draw.random() < 0.5:
        seqlen_k = seqlen_q
    shape = (batch, heads, seqlen_q, seqlen_k)
    parts, padding = [], None
    for kind in draw.sample(
        ["band", "padding", "padding_left", "ragged", "same"], draw.choice([0, 1, 2])
    ):
        if kind == "same":  # queries and keys share their lengths, as in self-attention
            lengths = torch.randint(0, min(seqlen_q, seqlen_k) + 1, (batch,))
            own = masks.padding(lengths, lengths)
        else:
            own = mask_of(kind, draw, shape)
        parts.append(own)
        if kind != "band":
            padding = own if padding is None else padding & own
    if draw.random() < 0.4:
        parts.append(masks.causal(draw.choice(["top_left", "bottom_right"])))
    if with_alibi and draw.random() < 0.3:
        sizes, align = draw.choice([(), (batch,)]), draw.choice(["top_left", "bottom_right"])
        parts.append(masks.alibi(torch.rand(*sizes, heads), align))
    mask = functools.reduce(operator.and_, parts) if parts else None
    query = torch.randn(batch, heads, seqlen_q, 16, dtype=torch.float64)
    key, value = torch.randn(2, batch, heads_kv, seqlen_k, 16, dtype=torch.float64)
    if draw.random() < 0.5:  # the layout that a projection returns
        query, key = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key))
    hidden = None
    if padding is not None:
        hidden = ~visible_of(spec_of_mask(padding, *shape, query.device), shape)[:, 0].any(1)
    return (query, key, value), {"attn_mask": mask, "enable_gqa": True, "scale": 0.3}, hidden


def drawn_packed(number, with_alibi):
    """Return the arguments and options of a random call on packed sequences."""
    draw = random.Random(number)
    torch.manual_seed(number)
    lengths = [[draw.choice([0, draw.randint(1, 40)]) for _ in range(3)] + [7] for _ in range(2)]
    starts = [torch.tensor([0, *n]).cumsum(0) for n in lengths]
    if draw.random() < 0.5:
        starts[1], lengths[1] = starts[0], lengths[0]
    heads, heads_kv = draw.choice([(2, 1), (2, 2), (6, 2)])
    mask = masks.sliding_window(
        draw.choice([-1, -1, 0, 9]),
        draw.choice([-1, 0, 3]),
        draw.choice(["top_left", "bottom_right"]),
    )
    if with_alibi and draw.random() < 0.3:
        mask = mask & masks.alibi(torch.rand(4, heads), "bottom_right")
    query = torch.randn(int(starts[0][-1]), heads, 16, dtype=torch.float64)
    key, value = torch.randn(2, int(starts[1][-1]), heads_kv, 16, dtype=torch.float64)
    return (query, key, value, *starts, 40, 40), {"attn_mask": mask, "scale": 0.3}


def results(function, arguments, options, backend, want_lse, gradients):
    """Return out, lse if requested, and the gradients of a loss that includes both."""
    tensors, rest = arguments[:3], arguments[3:]
    leaves = [t.detach().requires_grad_(gradients) for t in tensors]
    got = function(*leaves, *rest, **options, return_lse=want_lse, backend=backend)
    got = list(got) if want_lse else [got]
    if gradients:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in got]
        terms = [t.where(t.isfinite(), 0.0) * w for t, w in zip(got, weights, strict=True)]
        got += torch.autograd.grad(sum(term.sum() for term in terms), leaves)
    return [t.detach() for t in got]


REASONS = (
    "different lengths",
    "last queries",
    "for the last query",
    "not this mask",
    "bottom right",
    "to seqlen_k",
)


def check(number, engine):
    """Compare a random call with eager attention; return False if the engine refuses the call."""
    draw = random.Random(-number)
    if number % 3 == 0:
        arguments, options = drawn_packed(number, engine.has_alibi)
        function, hidden = fused_attn.varlen_attention, None
    else:
        arguments, options, hidden = drawn(number, engine.has_alibi)
        function = fused_attn.scaled_dot_product_attention
    if engine.has_softcap and draw.random() < 0.3:
        options["softcap"] = 2.0
    gradients = draw.random() < 0.6
    want_lse = draw.random() < 0.5 and (engine.has_lse_gradient or not gradients)
    wanted = results(function, arguments, options, "eager", want_lse, gradients)
    if hidden is not None:  # NaN in padding must not affect any result
        query, *others = arguments
        nan = [t.masked_fill(hidden[:, None, :, None], float("nan")) for t in others]
        arguments = (query, *nan)
    try:
        got = results(function, arguments, options, "flash", want_lse, gradients)
    except NotImplementedError as error:
        if any(reason in str(error) for reason in REASONS):
            return False
        raise
    torch.testing.assert_close(
        got, wanted, rtol=1e-6, atol=1e-6, msg=lambda message: f"call {number}: {message}"
    )
    return True


@pytest.mark.parametrize("name", ENGINES)
def test_random_problems(install, name):
    """Each engine supports at least 120 of 200 random calls, and matches eager attention."""
    install(name)
    assert sum(check(number, ENGINES[name]) for number in range(200)) >= 120
    assert flash_models.calls


def test_order_of_preference(install):
    """The first installed engine that supports the call computes it."""
    query = torch.randn(1, 2, 20, 16, dtype=torch.float64)

    def run(*names, **options):
        install(*names)
        flash_models.calls.clear()
        fused_attn.scaled_dot_product_attention(
            query, query, query, is_causal=True, backend="flash", **options
        )
        return flash_models.calls[-1]

    everything = list(ENGINES)
    assert everything == ["flash-attn-4", "flash-attn-3", "flash-attn", "torch.nn.attention.varlen"]
    assert "learnable_sink" in run(*everything)
    assert "sm_margin" in run(*everything[1:])
    assert "dropout_p" in run(*everything[2:])
    assert "cu_seq_q" in run(*everything[3:])
    alibi = masks.causal() & masks.alibi(torch.rand(2))
    install(*everything)
    fused_attn.scaled_dot_product_attention(query, query, query, alibi, backend="flash")
    assert flash_models.calls[-1]["alibi_slopes"] is not None
